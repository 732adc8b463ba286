"""From patch coordinates, or from sizes, to the batch's grids, grouped. Reads the device once; nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .matrices import SEPARABLE_MODES

LARGEST = 2**31 - 1  # a coordinate: the cells of a grid can still be counted in int64


@dataclass(frozen=True)
class Group:
    """Samples of one batch that share a grid of ``h`` x ``w`` cells.

    ``tokens`` of each sample get an embedding. Token n takes cell n of the grid in row-major order or, where ``cells``
    is given, cell ``cells[n]``. With ``pads`` the tokens behind them get cell 0, the cell of the coordinate (0, 0).
    """

    h: int
    w: int
    samples: list[int]
    tokens: int
    cells: Tensor | None = None
    pads: bool = False


def check_size(size: tuple[int, int]) -> None:
    """Raise ValueError unless ``size`` is (h, w), two integers of at least 1."""
    if isinstance(size, int) or len(size) != 2 or any(isinstance(n, (float, str)) for n in size) or min(size) < 1:
        got = size if isinstance(size, (int, str)) else tuple(size)
        raise ValueError(f"size must be (h, w), both integers of at least 1; got {got!r}")


def check_mode(mode: str) -> None:
    """Raise ValueError for a mode that is not separable."""
    if mode not in SEPARABLE_MODES:
        raise ValueError(f"mode={mode!r} cannot be resampled exactly; valid: {', '.join(map(repr, SEPARABLE_MODES))}")


def check_tokens(x: Tensor, channels: int) -> None:
    """Raise ValueError unless ``x`` is a floating (B, N, channels) tensor."""
    if x.ndim != 3 or x.shape[-1] != channels:
        raise ValueError(f"x must be tokens of shape (B, N, {channels}), as wide as the table; got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"x must be floating point; got {x.dtype}")


def check_coord(patch_coord: Tensor, x: Tensor) -> None:
    """Raise ValueError unless ``patch_coord`` is a (B, N, 2) tensor of numbers that fits ``x`` (B, N, C)."""
    if not isinstance(patch_coord, Tensor) or patch_coord.shape != (*x.shape[:2], 2):
        got = tuple(patch_coord.shape) if isinstance(patch_coord, Tensor) else type(patch_coord).__name__
        raise ValueError(
            f"patch_coord must hold (y, x) for each token, shape {(*x.shape[:2], 2)} for x of shape "
            f"{tuple(x.shape)}; got {got}"
        )
    if patch_coord.is_complex() or patch_coord.dtype is torch.bool:
        raise ValueError(f"patch_coord must hold integers; got {patch_coord.dtype}")


def whole_numbers(patch_coord: Tensor) -> Tensor:
    """Coordinates as int64: -1 where not finite, 2**31 where larger, because casting such a float is undefined."""
    coord = patch_coord.detach()
    if coord.is_floating_point():
        coord = coord.to(torch.promote_types(coord.dtype, torch.float32))
        coord = coord.clamp(-1, LARGEST + 1).nan_to_num(nan=-1)
    return coord.to(torch.int64)


def bad_coordinate(sample: int) -> ValueError:
    """The error for a coordinate that names no cell."""
    return ValueError(
        f"patch_coord of sample {sample} holds a negative or non-finite coordinate, or one beyond {LARGEST}; "
        "coordinates count from 0, and padding tokens carry (0, 0)"
    )


def group_grids(patch_coord: Tensor, x: Tensor, *, pads: bool = False, squares: bool = False) -> list[Group]:
    """The grids of a batch, as timm reads them: a sample's grid is its largest coordinate + 1 on each axis.

    Args:
        patch_coord: (B, N, 2) coordinates (y, x), integers in any dtype.
        x: (B, N, C) tokens; only the shape is used.
        pads: padding tokens get an embedding too, that of their coordinate.
        squares: the table is resized to (L, L), L = max(h, w), of which (h, w) is kept.

    Returns:
        One group for each distinct grid of row-major samples, in order of first appearance, then one group for each
        sample whose tokens were reordered or dropped. Empty when the batch holds no token. Padding tokens, those from
        the h*w-th on, are not looked at; with ``pads`` they are, and where they name no cell of the grid they count
        as (0, 0).

    Raises:
        ValueError: shapes that do not fit; a negative, non-finite or huge coordinate among a grid's tokens; a grid of
            more than 64 N + 4,096 cells, or whose square has more where tokens are missing.
    """
    check_coord(patch_coord, x)
    batch, length = x.shape[:2]
    if batch == 0 or length == 0:
        return []
    coord = whole_numbers(patch_coord)
    lowest, highest = torch.aminmax(coord, dim=1)
    h, w = (highest + 1).unbind(1)
    order = torch.arange(length, device=coord.device)
    y, x_ = coord.unbind(2)
    cell = torch.addcmul(x_, y, w[:, None])
    in_grid = order < (h * w)[:, None]
    misplaced = ((cell != order) & in_grid).sum(1)
    if pads:
        in_cell = ((coord >= 0) & (coord < (highest + 1)[:, None])).all(2)
        cell = torch.where(in_grid | in_cell, cell, 0)
        misplaced += ((cell != 0) & ~in_grid).sum(1)
    facts = torch.stack((h, w, misplaced, *lowest.unbind(1)), 1).tolist()  # the device-to-host copy

    row_major: dict[tuple[int, int], list[int]] = {}
    reordered = []
    for sample, (rows, cols, wrong, *low) in enumerate(facts):
        no_grid = not (0 < rows <= LARGEST and 0 < cols <= LARGEST)
        if no_grid or (min(low) < 0 and int(coord[sample, : rows * cols].min()) < 0):
            raise bad_coordinate(sample)
        # An image that has all its tokens may be as long as it is: timm computes its square too.
        square = squares and rows * cols > length
        height, width = (max(rows, cols),) * 2 if square else (rows, cols)
        if height * width > 64 * length + 4096:
            resized = f", resized as {height} x {width} (ar_preserving)" if square else ""
            raise ValueError(
                f"patch_coord of sample {sample} spans a grid of {rows} x {cols} cells{resized}, "
                f"too many for {length} tokens; "
                f"valid are at most 64 x {length} + 4096 = {64 * length + 4096} cells"
            )
        if not wrong:
            row_major.setdefault((rows, cols), []).append(sample)
        else:
            tokens = length if pads else min(length, rows * cols)
            reordered.append(Group(rows, cols, [sample], tokens, cell[sample, :tokens]))
    return [Group(r, c, samples, min(length, r * c), pads=pads) for (r, c), samples in row_major.items()] + reordered


def whole_batch(x: Tensor, grid_size: Sequence[int]) -> list[Group]:
    """The one group of a plain image batch: every sample of ``x`` (B, h*w, C) on ``grid_size`` = (h, w).

    Raises:
        ValueError: N is not h*w.
    """
    h, w = int(grid_size[0]), int(grid_size[1])
    if x.shape[1] != h * w:
        raise ValueError(f"x must hold one token per cell of the {h} x {w} grid, {h * w}; got shape {tuple(x.shape)}")
    return [Group(h, w, list(range(x.shape[0])), h * w)]


def token_counts(groups: list[Group], x: Tensor) -> list[tuple[int, int]]:
    """For each sample of ``x`` (B, N, C), how many of its tokens get an embedding, and how many lie behind them."""
    counts = [0] * x.shape[0]
    for group in groups:
        for sample in group.samples:
            counts[sample] = group.tokens
    return [(count, x.shape[1] - count) for count in counts]


def sizes_on_host(grid_sizes: Tensor | Sequence[Sequence[int]], batch: int | None = None) -> list[tuple[int, int, int]]:
    """Sizes (B, 2) as (h, w) or (B, 3) as (t, h, w), read from a device only if they are there, as (t, h, w).

    Raises:
        ValueError: another shape or dtype, another number of images than ``batch``, or a size below 1.
    """
    listed = grid_sizes.tolist() if isinstance(grid_sizes, Tensor) else [list(size) for size in grid_sizes]
    wide = all(isinstance(size, list) and len(size) in (2, 3) for size in listed) if isinstance(listed, list) else False
    if not wide or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for size in listed for n in size):
        raise ValueError(
            "grid_sizes must hold (h, w) or (t, h, w) for each image, integers of at least 1, shape (B, 2) or (B, 3); "
            f"got {listed if not isinstance(listed, list) or len(listed) < 5 else f'{listed[:4]} and more'}"
        )
    if batch is not None and len(listed) != batch:
        raise ValueError(f"grid_sizes must hold one size for each of the {batch} samples; got {len(listed)}")
    return [(1, *size) if len(size) == 2 else tuple(size) for size in listed]


def group_sizes(
    sizes: list[tuple[int, int, int]], *, merge: int = 1, pads: bool, length: int | None
) -> tuple[list[Group], list[tuple[int, int]]]:
    """Groups of equal grids from sizes (t, h, w), and how many tokens each frame has: its cells, and those behind.

    Every frame counts as a sample. ``length`` pads each image to so many tokens, behind its last frame.

    Raises:
        ValueError: ``merge`` does not divide a size, or ``length`` is less than the tokens of an image.
    """
    frames: dict[tuple[int, int], list[int]] = {}
    counts: list[tuple[int, int]] = []
    for number, (t, h, w) in enumerate(sizes):
        if h % merge or w % merge:
            raise ValueError(f"merge must divide every height and width; {merge} does not divide {h} x {w}")
        rest = 0 if length is None else length - t * h * w
        if rest < 0:
            raise ValueError(f"length must hold every image; image {number} has {t * h * w} tokens, length is {length}")
        frames.setdefault((h, w), []).extend(range(len(counts), len(counts) + t))
        counts += [(h * w, 0)] * (t - 1) + [(h * w, rest)]
    groups = []
    for (h, w), samples in frames.items():
        cells = None
        if merge > 1:
            blocks = torch.arange(h * w, device="cpu").view(h // merge, merge, w // merge, merge)
            cells = blocks.transpose(1, 2).flatten()
        groups.append(Group(h, w, samples, h * w, cells, pads))
    return groups, counts
