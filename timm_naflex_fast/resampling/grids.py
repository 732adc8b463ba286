"""From patch coordinates to the batch's grids, grouped. Holds the exact strategies' only device-to-host copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 2**31 - 1  # a coordinate: the cells of a grid can still be counted in int64
FEW_CELLS = 4096


@dataclass(frozen=True)
class Group:
    """Samples of one batch that share a grid of ``h`` x ``w`` cells.

    ``tokens`` of each sample get an embedding: min(N, h*w). Token n takes cell n (row-major), or, where ``cells``
    is given (one sample whose tokens are in another order), cell ``cells[n]``.
    """

    h: int
    w: int
    samples: list[int]
    tokens: int
    cells: Tensor | None = None


def too_many(cells: int, tokens: int) -> bool:
    """Whether to compute all ``cells`` of a grid could take memory beyond all proportion to its ``tokens``."""
    return cells > max(16 * tokens, FEW_CELLS)


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
    """Coordinates as int64: -1 where not finite, 2**31 where larger, for casting such a float is undefined."""
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


def group_grids(patch_coord: Tensor, x: Tensor) -> list[Group]:
    """The grids of a batch, as timm reads them: a sample's grid is its largest coordinate + 1 on each axis.

    Args:
        patch_coord: (B, N, 2) coordinates (y, x), integers in any dtype; padding tokens carry (0, 0).
        x: (B, N, C) tokens, looked at for their shape only.

    Returns:
        One group per distinct grid of row-major samples, in order of first appearance, then one group for each
        sample whose tokens were reordered or dropped. Empty when the batch holds no token.

    Raises:
        ValueError: shapes that do not fit, or a negative, non-finite or huge coordinate among a grid's tokens.
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
    misplaced = ((cell != order) & (order < (h * w)[:, None])).sum(1)
    facts = torch.stack((h, w, misplaced, *lowest.unbind(1)), 1).tolist()  # the device-to-host copy

    regular: dict[tuple[int, int], list[int]] = {}
    reordered = []
    for sample, (rows, cols, wrong, *low) in enumerate(facts):
        no_grid = not (0 < rows <= LARGEST and 0 < cols <= LARGEST)
        if no_grid or (min(low) < 0 and int(coord[sample, : rows * cols].min()) < 0):
            raise bad_coordinate(sample)
        if not wrong:
            regular.setdefault((rows, cols), []).append(sample)
        else:
            tokens = min(length, rows * cols)
            reordered.append(Group(rows, cols, [sample], tokens, cell[sample, :tokens]))
    return [Group(r, c, samples, min(length, r * c)) for (r, c), samples in regular.items()] + reordered


def whole_batch(x: Tensor, grid_size: tuple[int, int]) -> list[Group]:
    """The one group of a plain image batch: every sample of ``x`` (B, h*w, C) on ``grid_size`` = (h, w).

    Raises:
        ValueError: N is not h*w.
    """
    h, w = int(grid_size[0]), int(grid_size[1])
    if x.shape[1] != h * w:
        raise ValueError(f"x must hold one token per cell of the {h} x {w} grid, {h * w}; got shape {tuple(x.shape)}")
    return [Group(h, w, list(range(x.shape[0])), h * w)]


def grid_tokens(x: Tensor, groups: list[Group]) -> Sequence[Tensor]:
    """Every sample's tokens that get an embedding, (tokens, C), as views of ``x`` (B, N, C) that autograd ignores.

    One split: slicing sample by sample costs as much as the embeddings themselves (64 samples of a 16 x 16 table).
    """
    batch, length, channels = x.shape
    tokens = [0] * batch
    for group in groups:
        for sample in group.samples:
            tokens[sample] = group.tokens
    x = x.detach()
    if not x.is_contiguous():
        return [sample[:n] for sample, n in zip(x, tokens)]
    return x.view(-1, channels).split_with_sizes([n for t in tokens for n in (t, length - t)])[::2]


def add_cells(tokens: Sequence[Tensor], group: Group, cells: Tensor) -> None:
    """Add a group's embeddings (h*w, C) to its samples' ``tokens``, the views of :func:`grid_tokens`, in place."""
    cells = cells[: group.tokens] if group.cells is None else cells[group.cells]
    for sample in group.samples:
        tokens[sample].add_(cells)
