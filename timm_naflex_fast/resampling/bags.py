"""A resize matrix as weighted sums of rows ("bags"): only its non-zeros are read, by ``torch.embedding_bag``.

A matrix of n rows with k non-zeros each costs n*k reads instead of n*n0, and no product of matrices takes part, so
that neither autocast nor TF32 can round it: every sum is float32 multiply-adds, in one order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .matrices import Resampling, axis_matrices, constants, taps


@dataclass(frozen=True)
class Bags:
    """Bag k sums the rows ``index[offsets[k]:offsets[k + 1]]``, each times its weight."""

    index: Tensor
    offsets: Tensor
    weights: Tensor

    def of(self, rows: Tensor) -> Tensor:
        """The sums (bags, C) of the rows (R, C), in their dtype."""
        weights = self.weights.to(rows.dtype)
        return torch.embedding_bag(rows, self.index, self.offsets, False, 0, False, weights)[0]


@dataclass(frozen=True)
class AtOnce:
    """Both axes in one step, cells to cells; where that leaves most cells untouched, bags for ``touched`` alone."""

    cells: Bags
    touched: Tensor | None


@dataclass(frozen=True)
class AxisByAxis:
    """One axis after the other: ``y`` sums rows of cells, ``x`` single cells."""

    y: Bags
    x: Bags


@lru_cache(maxsize=1024)
def steps(
    h: int,
    w: int,
    table_size: tuple[int, int],
    how: Resampling,
    adjoint: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> AtOnce | AxisByAxis | None:
    """The way from table (H0, W0) to grid (h, w), or a gradient's way back; None where timm adds the table as it is."""
    with constants(device):
        matrices = axis_matrices(h, w, table_size, how, dtype, device)
        if matrices is None:
            return None
        a_h, a_w = (a.t() if adjoint else a for a in matrices)
        source_width = w if adjoint else table_size[1]
        reads_y, reads_x = (int((a != 0).sum()) for a in matrices)
        if not at_once(reads_y, reads_x, (h, w), table_size[1]):
            return AxisByAxis(_weave(taps(a_h), _each(1, a_h), 1), _weave(_each(h, a_w), taps(a_w), source_width))
        cells = _weave(taps(a_h), taps(a_w), source_width)
        touched = torch.cat((cells.offsets, cells.offsets.new_tensor([len(cells.index)]))).diff().nonzero()[:, 0]
        if 2 * len(touched) > len(cells.offsets):
            return AtOnce(cells, None)
        return AtOnce(Bags(cells.index, cells.offsets[touched], cells.weights), touched)


def at_once(reads_y: int, reads_x: int, grid: tuple[int, int], w0: int) -> bool:
    """Whether to resample both axes at once instead of one after the other.

    ``reads_y`` and ``reads_x`` count the non-zeros of A_h and A_w. At once, every cell reads the product of its taps;
    one after the other also writes and reads h*W0 cells in between. Writing a cell costs as much as reading four, and
    a further call as reading 400 (measured on 2 CPU cores, C=768). So bilinear tables go at once, bicubic ones mostly
    axis by axis. More than 16 taps always go axis by axis: one long sum would round more than timm's two short ones.
    """
    h, w = grid
    if reads_y * reads_x > 16 * h * w:
        return False
    return reads_y * reads_x <= reads_y * w0 + h * reads_x + 4 * h * w0 + 400


def _weave(rows: tuple[Tensor, Tensor], cols: tuple[Tensor, Tensor], source_width: int) -> Bags:
    """One bag for each pair of a row and a column: the products of their taps, on row-major cells."""
    index = rows[0][:, None, :, None] * source_width + cols[0][None, :, None, :]
    weights = rows[1][:, None, :, None] * cols[1][None, :, None, :]
    index, weights = index.flatten(2).flatten(0, 1), weights.flatten(2).flatten(0, 1)
    read = weights != 0
    ends = read.sum(1).cumsum(0)
    return Bags(index[read], ends - read.sum(1), weights[read])


def _each(n: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The taps of the identity: n lines as they are."""
    return torch.arange(n, device=like.device)[:, None], like.new_ones(n, 1)
