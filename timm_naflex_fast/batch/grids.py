"""From patch coordinates to the grid of each sample. Here alone they are copied to the host."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..resampling.spec import Size
from .checks import MAX_COORDINATE, InvalidCoordinateError


def whole_numbers(patch_coord: Tensor) -> Tensor:
    """Coordinates as int64. Floats are first cut to -1 ... 2**31, and NaN to -1.

    To cast others is undefined.
    """
    coord = patch_coord.detach()
    if coord.is_floating_point():
        if coord.dtype is not torch.float64:
            coord = coord.to(torch.float32)  # half precision cannot hold the bounds
        coord = coord.clamp(-1, MAX_COORDINATE + 1).nan_to_num(nan=-1)
    return coord.to(torch.int64)


def grid_sizes_from_coord(patch_coord: Tensor) -> Tensor:
    """The grid of each sample, (B, 2) as (h, w): the largest coordinate on each axis + 1.

    For graphs: on the host ``read_grids`` tells. One maximum for each axis: OpenVINO 2026.4 computes
    one over both wrong.
    """
    y, x = patch_coord.unbind(-1)  # (B, N)
    return torch.stack((y.amax(1), x.amax(1)), 1) + 1


class Grids(NamedTuple):
    """The grids of a batch, as the host knows them."""

    sizes: list[Size]
    cell: Any
    """The cell of each token in row-major order, (B, N), NumPy's.

    None where all tokens stand in that order.
    """
    reordered: list[bool]
    """For each sample, whether its tokens stand in another order: then ``cell`` says in which."""


def read_grids(patch_coord: Tensor, embeds_padding: bool = False) -> Grids:
    """Read the coordinates (B, N, 2), B and N at least 1: this is the device-to-host copy.

    By NumPy: on so few numbers its operations cost a third of PyTorch's.

    Raises:
        InvalidCoordinateError: a negative, non-finite or huge coordinate among a grid's own tokens;
            with ``embeds_padding`` also among its padding, and one that is no whole number.
    """
    on_host = patch_coord.cpu()
    whole = on_host if on_host.dtype is torch.int64 else whole_numbers(on_host)
    coord: Any = whole.contiguous().numpy()

    # Most cheaply told are images of one size without padding, or one image with any: the last token
    # names the last cell.
    batch, length, _ = coord.shape
    tokens = length
    y, x = coord[0, -1].tolist()
    if batch == 1 and y == x == 0:
        (not_zero,) = coord.ravel().nonzero()
        tokens = not_zero[-1] // 2 + 1 if len(not_zero) else 1
        y, x = coord[0, tokens - 1].tolist()
    h = y + 1
    w = x + 1
    if h > 0 and h * w == tokens and (coord[:, :tokens] == _row_major(h, w)).all():
        grids = Grids([(h, w)] * batch, None, [False] * batch)
    else:
        grids = _grids_from_maxima(coord, embeds_padding)
    if embeds_padding and on_host.is_floating_point() and bool((whole != on_host).any()):
        raise _no_whole_number()
    return grids


@lru_cache(maxsize=64)
def _row_major(h: int, w: int) -> Any:
    """The coordinates (h*w, 2) of a grid in row-major order."""
    return np.indices((h, w)).reshape(2, -1).T.copy()


def _grids_from_maxima(coord: Any, embeds_padding: bool) -> Grids:
    """The grids of any batch, from all its coordinates."""
    batch, length, _ = coord.shape
    # All y, then all x, (2, B, N): NumPy is slow on every other number.
    axes = coord.transpose(2, 0, 1).copy()
    # Read without its sign, a negative number is a huge one: one maximum finds both.
    largest = np.maximum.reduce(axes.view(np.uint64), 2)  # (2, B)
    if largest.max() >= MAX_COORDINATE:
        largest = axes.max(2)
        _check_cells(coord, largest.T.tolist())
        if embeds_padding and axes.min() < 0:
            raise _no_whole_number()

    heights, widths = largest.astype(np.int64) + 1  # (B,) each
    cells = heights * widths
    sizes = list(zip(heights.tolist(), widths.tolist()))
    cell = axes[0] * widths[:, None] + axes[1]  # (B, N)
    if cells.min() > length:
        # Every image has lost tokens. That the others stand in order all the same is rare, so
        # nobody looks.
        return Grids(sizes, cell, [True] * batch)

    # A token stands in order if it names the cell of its number. Padding names the cell (0, 0),
    # and counts where it is embedded.
    order = np.arange(length)
    in_grid = order < cells[:, None]  # (B, N)
    if embeds_padding:
        elsewhere = cell != order * in_grid
    else:
        elsewhere = (cell != order) & in_grid
    reordered = elsewhere.any(1).tolist()
    return Grids(sizes, cell if any(reordered) else None, reordered)


def _check_cells(coord: Any, largest: list[list[int]]) -> None:
    """Each sample's grid must have cells, and its tokens must name them.

    ``largest``: of each sample the largest y and x.
    """
    for sample, (y, x) in enumerate(largest):
        has_cells = 0 <= y < MAX_COORDINATE and 0 <= x < MAX_COORDINATE
        if not has_cells or coord[sample, : (y + 1) * (x + 1)].min() < 0:
            raise InvalidCoordinateError(
                f"patch_coord of sample {sample} holds a negative or non-finite coordinate, or one "
                f"beyond {MAX_COORDINATE}; coordinates count from 0, and padding tokens carry "
                "(0, 0)"
            )


def _no_whole_number() -> InvalidCoordinateError:
    return InvalidCoordinateError(
        "patch_coord must be whole numbers from 0, those of padding tokens too; it is not"
    )
