"""The resize matrices of one table for all lengths 1, 2, ..., as the bands that the Triton kernels read.

While a table grows, a row of ``A_n`` weighs at most 5 neighbouring cells. So unit vectors that lie 8 cells apart never
meet in a row, and one signal, a *comb*, can hold all of them: 8 combs give every weight of ``A_n``, however long the
table is, with PyTorch's own rounding. For lengths below the table's own, the whole matrix is computed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..resampling.matrices import ResizeSpec, axis_matrix, cell_positions, sample

TEETH = 8  # cells from one tooth of a comb to the next
LONGEST = 4095  # of the lengths that have a matrix
ROWS = 2 * LONGEST  # where the first columns begin


class Bands(NamedTuple):
    """The bands (see ``triton_kernels``) of ``A_h``, ``A_w``, ``A_h^T`` and ``A_w^T``, and the weights of all."""

    y: Tensor
    x: Tensor
    seen_y: Tensor
    seen_x: Tensor
    weights: Tensor
    most_taps: int  # of a row of ``A_h`` or ``A_w``

    def to(self, device: torch.device) -> Bands:
        """The same on a device."""
        y, x, seen_y, seen_x, weights = (tensor.to(device) for tensor in self[:5])
        return Bands(y, x, seen_y, seen_x, weights, self.most_taps)


class Entries(NamedTuple):
    """What is not 0 in the matrices of all lengths: its length, its row, its column, and its weight."""

    n: Tensor
    row: Tensor
    column: Tensor
    weight: Tensor


def make_bands(size: tuple[int, int], spec: ResizeSpec, longest: int) -> Bands:
    """The bands for a table (H0, W0) and every length up to ``longest``, on the CPU."""
    axes = range(1 if size[0] == size[1] else 2)  # the axes of a square table share their matrices
    entries = [_entries(axis, size[axis], spec, longest) for axis in axes]
    lengths = torch.arange(1, longest + 1, device="cpu")
    counts = [torch.full_like(lengths, size[axis]) for axis in axes]
    packed = [_pack(own, lengths, count) for own, count in zip(entries, counts)]
    packed += [_pack(Entries(e.n, e.column, e.row, e.weight), count, lengths) for e, count in zip(entries, counts)]
    begins = 0
    for bands, weights in packed:
        bands[: 2 * longest : 2] += begins
        begins += len(weights)
    found, seen = [bands for bands, _ in packed], len(axes)
    most = max(int(bands[1 : 2 * longest : 2].max()) for bands in found[:seen])
    return Bands(found[0], found[seen - 1], found[seen], found[-1], torch.cat([w for _, w in packed]), most)


def _entries(axis: int, n0: int, spec: ResizeSpec, longest: int) -> Entries:
    """The entries of ``A_1`` to ``A_longest`` of a table with ``n0`` cells along ``axis``."""
    parts = []
    for n in range(1, min(n0, longest + 1)):
        matrix = axis_matrix(axis, n, n, n0, spec)
        row, column = matrix.nonzero().unbind(1)
        parts.append(Entries(torch.full_like(row, n), row, column, matrix[row, column]))
    lengths = torch.arange(n0, longest + 1, device="cpu")
    if len(lengths):
        combs = (torch.arange(n0, device="cpu") % TEETH == torch.arange(TEETH, device="cpu")[:, None]).float()
        weights = torch.cat([_resize(combs, n, spec) for n in lengths.tolist()])
        length = lengths.repeat_interleave(lengths)
        row = torch.arange(len(length), device="cpu") - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        first = (_centre(row.double(), length, n0, spec).floor().long() - TEETH // 2 + 1).clamp(0, max(n0 - TEETH, 0))
        at, tooth = weights.nonzero().unbind(1)
        parts.append(Entries(length[at], row[at], first[at] + (tooth - first[at]) % TEETH, weights[at, tooth]))
    return Entries(*map(torch.cat, zip(*parts)))


def _resize(combs: Tensor, n: int, spec: ResizeSpec) -> Tensor:
    """Signals (K, n0) resized to (n, K), as ``axis_matrix`` resizes unit vectors."""
    if spec.sampler == "interpolate":
        options = dict(mode=spec.interpolation, antialias=spec.antialias, align_corners=spec.align_corners)
        return F.interpolate(combs[None, None], size=(len(combs), n), **options)[0, 0].t()  # type: ignore[arg-type]
    return sample(combs, cell_positions(n, spec.align_corners), spec)


def _centre(row: Tensor, n: Tensor, n0: int, spec: ResizeSpec) -> Tensor:
    """Where in the table the rows of ``A_n`` lie, in cells."""
    if not spec.align_corners:
        return (row + 0.5) * n0 / n - 0.5
    step = (n0 - 1) / (n - 1).clamp(min=1)
    return (row + 0.5) * step - 0.5 if spec.antialias and spec.sampler == "interpolate" else row * step


def _pack(entries: Entries, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """The bands of matrices with so many ``rows`` and ``columns``, one for each length; and their weights."""
    before = rows.cumsum(0) - rows
    index, count = before[entries.n - 1] + entries.row, int(rows.sum())
    first = torch.full((count,), int(columns.max()), device="cpu").scatter_reduce(0, index, entries.column, "amin")
    last = torch.full((count,), -1, device="cpu").scatter_reduce(0, index, entries.column, "amax")
    n = torch.arange(len(rows), device="cpu").repeat_interleave(rows)
    taps = torch.ones_like(rows).scatter_reduce(0, n, last - first + 1, "amax")
    taps += taps % 2 * (columns.min() % 2 == 0)  # an even count, where the columns of the table are
    first = first.minimum((columns - taps)[n])  # a row with fewer weights is filled up with zeros inside the matrix
    begins = (rows * taps).cumsum(0) - rows * taps
    weights = torch.zeros(int((rows * taps).sum()), device="cpu")
    own = entries.n - 1
    weights[begins[own] + entries.row * taps[own] + entries.column - first[index]] = entries.weight
    bands = torch.zeros(ROWS + count, dtype=torch.int32, device="cpu")
    bands[: 2 * len(rows)] = torch.stack((begins, taps), 1).flatten()
    bands[ROWS:] = first
    return bands, weights
