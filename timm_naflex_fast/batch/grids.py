"""From patch coordinates, or from sizes, to the batch's grids, grouped. Reads the device once;
nothing else does."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..resampling.matrices import ResizeSpec
from .checks import MAX_COORDINATE, InvalidCoordinateError, as_int

FrameSizes = list[tuple[int, int, int]]
"""The sizes (t, h, w) of images on the host: t frames of h x w cells."""
TokenCounts = list[tuple[int, int]]
"""For each sample, how many of its tokens get an embedding, and how many come after them
(padding)."""
MAX_SAVED = (
    4096  # tokens of a sample: up to here whole images are told by a saved list of coordinates
)


@dataclass
class GridGroup:
    """Samples of one batch that share a grid of ``h`` x ``w`` cells.

    Token n of a sample takes cell n of the grid, in row-major order; or, for a sample in
    ``cell_index``, the cell that is named there. With ``embeds_padding`` the tokens after them get
    cell 0, that of the coordinate (0, 0).
    """

    h: int
    w: int
    samples: list[int]
    cell_index: dict[int, Tensor] = field(
        default_factory=dict
    )  # (tokens,) of samples in another order
    embeds_padding: bool = False


class ResamplePlan(NamedTuple):
    """The grids of a batch, and how position tables are resampled to them: summed in ``dtype``,
    cast to the tokens'."""

    groups: list[GridGroup]
    counts: TokenCounts
    spec: ResizeSpec
    token_dtype: torch.dtype
    dtype: torch.dtype = torch.float32


def whole_numbers(patch_coord: Tensor) -> Tensor:
    """Coordinates as int64. Floats are first cut to -1 ... 2**31, and NaN to -1: to cast others is
    undefined."""
    coord = patch_coord.detach()
    if coord.is_floating_point():
        coord = coord.to(torch.promote_types(coord.dtype, torch.float32))
        coord = coord.clamp(-1, MAX_COORDINATE + 1).nan_to_num(nan=-1)
    return coord.to(torch.int64)


def plan_batch(
    x: Tensor, patch_coord: Tensor, spec: ResizeSpec, resizes_square: bool = False
) -> ResamplePlan:
    """The grids of a batch, as timm reads them: a sample's grid is its largest coordinate + 1 on
    each axis.

    Args:
        x: (B, N, C) tokens; only the shape and the dtype are used.
        patch_coord: (B, N, 2) coordinates (y, x), integers in any dtype.
        spec: how the tables are resized. The plan's own knows the largest grid, where that counts.
        resizes_square: with ``ar_preserving`` all of (L, L), L = max(h, w), is computed, although
            (h, w) is kept.

    Returns:
        One group for each distinct grid, in order of first appearance; and the counts. No group
        when the batch holds no token. Padding tokens, those from the h*w-th on, are not looked at,
        except where they get embeddings too.

    Raises:
        ValueError: a negative, non-finite or huge coordinate among a grid's tokens; a grid of
            more than 64 N + 4,096 cells, or whose square has more where tokens are missing.
            Further ones of ``read_grids``.
    """
    batch, length, _ = x.shape
    if batch == 0 or length == 0:
        return ResamplePlan([], [(0, length)] * batch, spec, x.dtype)
    heights, widths, cell, reordered = read_grids(patch_coord, spec.use_grid_sample)
    if cell is not None:
        cell = torch.from_numpy(cell)
        rows = cell.to(patch_coord.device, non_blocking=True).unbind()
    groups: dict[tuple[int, int], GridGroup] = {}
    counts = []
    for sample, (h, w, is_reordered) in enumerate(zip(heights, widths, reordered)):
        # An image that has all its tokens may be as long as it is: timm computes its square too.
        side = max(h, w) if resizes_square and spec.ar_preserving and h * w > length else 0
        if max(h * w, side * side) > 64 * length + 4096:
            raise _too_many(sample, (h, w), side, length)
        group = groups.get((h, w))
        if group is None:
            group = groups[h, w] = GridGroup(h, w, [], {}, spec.use_grid_sample)
        group.samples.append(sample)
        tokens = min(length, h * w)
        if is_reordered:
            tokens = length if spec.use_grid_sample else tokens
            group.cell_index[sample] = rows[sample] if tokens == length else rows[sample][:tokens]
        counts.append((tokens, length - tokens))
    if spec.reference == "affine_grid":
        spec = replace(spec, batch_max=spec.resized_size(max(heights), max(widths)))
    return ResamplePlan(list(groups.values()), counts, spec, x.dtype)


def grid_sizes_from_coord(patch_coord: Tensor) -> Tensor:
    """The grid of each sample, (B, 2) as (h, w), from coordinates (B, N, 2): the largest on each
    axis + 1.

    The package asks nowhere else. One maximum for each axis: OpenVINO 2026.4 computes one over both
    wrong.
    """
    return torch.stack([axis.amax(1) for axis in patch_coord.unbind(-1)], 1) + 1


def read_grids(
    patch_coord: Tensor, embeds_padding: bool = False
) -> tuple[list[int], list[int], Any, list[bool]]:
    """Read the coordinates (B, N, 2), B and N at least 1: this is the device-to-host copy.

    By NumPy: on so few numbers its operations cost a third of PyTorch's.

    Returns:
        Each sample's height and width; the cell of each token in row-major order, (B, N), NumPy's,
        or None where all tokens stand in that order; and of which samples the cells count. Where
        all samples lost tokens, of all: that the rest stands in row order is then so rare that
        nobody looks.

    Raises:
        ValueError: a negative, non-finite or huge coordinate among a grid's own tokens; with
            ``embeds_padding`` also among its padding, and one that is no whole number.
    """
    on_host = patch_coord.cpu()
    whole = on_host if on_host.dtype is torch.int64 else whole_numbers(on_host)
    coord: Any = whole.contiguous().numpy()
    batch, length, _ = coord.shape
    fractional = embeds_padding and on_host.is_floating_point() and bool((whole != on_host).any())
    # One image, or images of one size without padding, are told most cheaply: the last token names
    # the last cell.
    tokens = length
    y, x = coord[0, -1].tolist()
    if batch == 1 and y == x == 0:  # zeros come after it; their lowest bytes tell where they begin
        tokens = max((len(coord.astype(np.uint8).tobytes().rstrip(b"\0")) + 1) // 2, 1)
        y, x = coord[0, tokens - 1].tolist()
    is_whole = y >= 0 and (y + 1) * (x + 1) == tokens and not fractional
    if (
        is_whole
        and tokens <= MAX_SAVED
        and all(map(_row_major(x + 1).startswith, coord[:, :tokens]))
    ):
        if bytes(16 * (length - tokens)).startswith(coord[:, tokens:]):
            return [y + 1] * batch, [x + 1] * batch, None, [False] * batch
    # (B, N) each, and side by side: NumPy is slow on every other number. Unsigned, a negative one
    # is larger than all.
    y, x = axes = coord.view(np.uint64).transpose(2, 0, 1).copy()
    size = np.maximum.reduce(axes, 2) + 1  # (2, B)
    heights, widths = size.tolist()
    if not 0 < min(heights + widths) <= max(heights + widths) <= MAX_COORDINATE:
        size = axes.view(np.int64).max(2).view(np.uint64) + 1
        heights, widths = size.tolist()
        _check_cells(
            coord, heights, widths, InvalidCoordinateError if embeds_padding else ValueError
        )
    if fractional or (embeds_padding and coord.min() < 0):
        raise InvalidCoordinateError(
            "patch_coord must be whole numbers from 0, those of padding tokens too; it is not"
        )
    shortest = min(map(mul, heights, widths))
    cell = (y * size[1][:, None] + x).view(np.int64)  # (B, N)
    if shortest > length:
        return heights, widths, cell, [True] * batch
    order = np.arange(length)
    elsewhere = cell != order
    if shortest < length:  # there is padding
        in_grid = order < (size[0] * size[1]).view(np.int64)[:, None]
        elsewhere = cell != order * in_grid if embeds_padding else elsewhere & in_grid
    reordered = elsewhere.any(1).tolist()
    return heights, widths, cell if any(reordered) else None, reordered


@lru_cache(maxsize=64)
def _row_major(w: int) -> bytes:
    """The coordinates (y, x) of a grid of width ``w`` as they stand in memory, the same for every
    height: 64 KiB.

    As bytes, which compare memory as it stands: on so few numbers NumPy needs longer to begin.
    """
    cells = np.empty((MAX_SAVED // w, w, 2), np.int64)
    cells[..., 0], cells[..., 1] = np.arange(MAX_SAVED // w)[:, None], np.arange(w)
    return cells.tobytes()


def _check_cells(
    coord: Any, heights: list[int], widths: list[int], error: type[ValueError]
) -> None:
    """Each sample's grid must have cells, and its tokens of ``coord`` (B, N, 2), NumPy's, must name
    them."""
    for sample, (h, w) in enumerate(zip(heights, widths)):
        if (
            not (0 < h <= MAX_COORDINATE and 0 < w <= MAX_COORDINATE)
            or coord[sample, : h * w].min() < 0
        ):
            raise error(
                f"patch_coord of sample {sample} holds a negative or non-finite coordinate, or one beyond "
                f"{MAX_COORDINATE}; coordinates count from 0, and padding tokens carry (0, 0)"
            )


def _too_many(sample: int, grid: tuple[int, int], side: int, length: int) -> ValueError:
    """One token with a huge coordinate must not take memory out of proportion. ``side``: of the
    square, 0 if none."""
    resized = f", resized as {side} x {side} (ar_preserving)" if side else ""
    return ValueError(
        f"patch_coord of sample {sample} spans a grid of {grid[0]} x {grid[1]} cells{resized}, too many for {length} "
        f"tokens; valid are at most 64 x {length} + 4096 = {64 * length + 4096} cells"
    )


def bad_sizes(got: Any, columns: tuple[int, ...]) -> ValueError:
    """The error for sizes of another shape or dtype, or below 1; ``columns``: 2 for (h, w), 3 for
    (t, h, w)."""
    valid, shapes = (
        ("(h, w) or (t, h, w)", "(B, 2) or (B, 3)") if 3 in columns else ("(h, w)", "(B, 2)")
    )
    return ValueError(
        f"grid_sizes must hold {valid} for each image, integers of at least 1, shape {shapes}; got {got}"
    )


def sizes_on_host(
    grid_sizes: Any, columns: tuple[int, ...] = (2, 3), batch: int | None = None
) -> FrameSizes:
    """Sizes (B, 2) as (h, w) or (B, 3) as (t, h, w), read from a device only if they are there, as
    (t, h, w).

    Args:
        grid_sizes: a tensor, an array or a sequence, of integers.
        columns: 2 where only (h, w) is valid.
        batch: how many images there must be.

    Raises:
        ValueError: another shape or dtype, another number of images than ``batch``, or a size below
            1.
    """
    listed = grid_sizes.tolist() if hasattr(grid_sizes, "tolist") else grid_sizes
    try:
        sizes = [tuple(map(as_int, size)) for size in listed]
        fits = all(len(size) in columns and min(size) > 0 for size in sizes)
    except TypeError:
        fits = False
    if not fits:
        few = not isinstance(listed, Sequence) or len(listed) < 5
        raise bad_sizes(listed if few else f"{listed[:4]} and more", columns)
    check_count(len(sizes), batch)
    return [(1, *size) if len(size) == 2 else size for size in sizes]  # type: ignore[misc]


def check_count(sizes: int, batch: int | None) -> None:
    """There must be one size for each sample of a batch; None: there are no samples yet."""
    if batch not in (None, sizes):
        raise ValueError(
            f"grid_sizes must hold one size for each of the {batch} samples; got {sizes}"
        )


def group_sizes(
    sizes: FrameSizes, *, merge: int, embeds_padding: bool, length: int | None
) -> tuple[list[GridGroup], TokenCounts]:
    """Groups of equal grids from sizes (t, h, w), and how many tokens each frame has: its cells,
    and the padding.

    Every frame counts as a sample. ``length``: each image is padded to this many tokens, after its
    last frame.

    Raises:
        ValueError: ``merge`` does not divide a size, or ``length`` is less than the tokens of an
            image.
    """
    frames: dict[tuple[int, int], list[int]] = {}
    counts: TokenCounts = []
    for number, (t, h, w) in enumerate(sizes):
        if h % merge or w % merge:
            raise ValueError(
                f"merge must divide every height and width; {merge} does not divide {h} x {w}"
            )
        padding = 0 if length is None else length - t * h * w
        if padding < 0:
            raise ValueError(
                f"length must hold every image; image {number} has {t * h * w} tokens, length is {length}"
            )
        if (h, w) not in frames:  # no ``setdefault``: the compiler of torch 2.4 cannot read it
            frames[h, w] = []
        frames[h, w].extend(range(len(counts), len(counts) + t))
        counts += [(h * w, 0)] * (t - 1) + [(h * w, padding)]
    groups = []
    for (h, w), samples in frames.items():
        cells: dict[int, Tensor] = {}
        if merge > 1:
            blocks = torch.arange(h * w, device="cpu").view(h // merge, merge, w // merge, merge)
            cells = dict.fromkeys(samples, blocks.transpose(1, 2).flatten())
        groups.append(GridGroup(h, w, samples, cells, embeds_padding))
    return groups, counts
