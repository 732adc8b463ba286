"""The matmul strategy: ``embedding(h, w) = A_h . P . A_w^T`` and its adjoint, as sums of few rows.

A resize matrix is a narrow band: a cell of the grid reads 2 to 4 cells of the table on each axis, more where the table
shrinks, and the rest of the matrix is zero. So no product of matrices runs here. Each product is a *sparse sum*: every
row of the result adds up the few source rows that it reads, each times its weight. ``torch.embedding_bag`` does that in
float32 at least; neither autocast nor TF32 can round it.

Forward, for each distinct height h and each grid (h, w) of that height::

    strip = A_h . P           (h, W0, C)      once for each height
    cells = strip . A_w^T     (h, w, C)       once for each grid, and added to the tokens of its samples

Where it costs less, as for most bilinear tables, one sparse sum takes both steps (``both_axes_together``).

Backward, in the reverse order. The gradient of the tokens passes through untouched, and ``g`` is read once::

    cells = sum of g over the samples of a grid
    strip = sum of (cells . A_w) over the grids of a height
    grad  = sum of (A_h^T . strip) over the heights
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .grids import Group
from .matrices import ResizeSpec, axis_matrix, taps
from .tokens import Tokens


class SparseSum(NamedTuple):
    """Row k of the result is the sum of ``source[reads[i]] * weights[i]`` for i from ``offsets[k]`` to the next offset.

    ``rows``: where few rows of the result are not zero, only these are computed, and this names them.
    """

    reads: Tensor
    offsets: Tensor
    weights: Tensor
    rows: Tensor | None = None

    def __call__(self, source: Tensor) -> Tensor:
        """The sums (rows, C) of a source (R, C)."""
        weights = self.weights.to(source.dtype)
        return torch.embedding_bag(source, self.reads, self.offsets, False, 0, False, weights)[0]

    def to(self, device: torch.device | None) -> SparseSum:
        """The same sum on another device."""
        rows = None if self.rows is None else self.rows.to(device)
        return SparseSum(self.reads.to(device), self.offsets.to(device), self.weights.to(device), rows)


Plan = tuple[SparseSum, ...]
"""The sparse sums from table to grid (or back), one after the other: two, or one for both axes, or none: a copy."""


def resize_plan(
    h: int,
    w: int,
    table_size: tuple[int, int],
    how: ResizeSpec,
    adjoint: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Plan:
    """The plan for a table (H0, W0) and a grid (h, w); for ``adjoint`` that of the transposed map, grid to table."""
    h0, w0 = table_size
    if how.sampler == "interpolate" and (h, w) == (h0, w0):
        return ()  # timm adds the table itself
    a_h, a_w = axis_matrix(0, h, w, h0, how, dtype), axis_matrix(1, h, w, w0, how, dtype)
    together = both_axes_together(int(a_h.count_nonzero()), int(a_w.count_nonzero()), (h, w), w0)
    y, x = (taps(a.t() if adjoint else a) for a in (a_h, a_w))  # (index, weights) of each axis
    if together:
        both = _sparse_sum(y, x, w if adjoint else w0)
        plan: Plan = (_few_rows(both) if adjoint else both,)
    else:
        # "every" leaves the other axis alone: row i reads row i.
        every_row = torch.arange(h, device="cpu")[:, None], torch.ones(h, 1, dtype=dtype, device="cpu")
        every_column = every_row[0][:1], every_row[1][:1]
        along_y = _sparse_sum(y, every_column, 1)  # its rows are whole lines, so there is one column
        along_x = _sparse_sum(every_row, x, w if adjoint else w0)
        plan = (along_x, along_y) if adjoint else (along_y, along_x)
    return tuple(sums.to(device) for sums in plan)


def both_axes_together(reads_y: int, reads_x: int, grid: tuple[int, int], w0: int) -> bool:
    """Whether to sum over both axes in one step instead of one axis after the other.

    ``reads_y`` and ``reads_x`` count the non-zeros of A_h and A_w. Together, each cell reads the product of its taps.
    One after the other, the strip of h*W0 cells is written and read in between. Writing a cell costs as much as reading
    four, and one more call as much as reading 400 (measured on 2 CPU cores, C=768). So bilinear tables are summed
    together and bicubic ones mostly are not. Never together with more than 16 taps: one long float32 sum rounds more
    than timm's two short ones.
    """
    h, w = grid
    if reads_y * reads_x > 16 * h * w:
        return False
    return reads_y * reads_x <= reads_y * w0 + h * reads_x + 4 * h * w0 + 400


def resample(
    table: Tensor, groups: list[Group], how: ResizeSpec, dtype: torch.dtype, plan: Callable[..., Plan] = resize_plan
) -> Iterator[tuple[Group, Tensor]]:
    """Each group of samples with its cells: the table (H0, W0, C) resampled to its grid, (h*w, C), in ``dtype``.

    If the sizes match, the cells are the table itself, not converted.
    """
    size, channels = (table.shape[0], table.shape[1]), table.shape[2]
    own = table.detach().reshape(-1, channels).contiguous()
    cells = own.to(dtype)
    rows = cells.view(size[0], -1)  # a row of the table is one long row (W0*C) for the sum along y
    for same_height in _by_height(groups, how):
        strip = None
        for group in same_height:
            sums = plan(group.h, group.w, size, how, False, dtype, table.device)
            if not sums:
                yield group, own
            elif len(sums) == 1:
                yield group, sums[0](cells)
            else:
                strip = sums[0](rows).view(-1, channels) if strip is None else strip
                yield group, sums[1](strip)


def table_gradient(
    tokens: Tokens,
    shape: Sequence[int],
    groups: list[Group],
    how: ResizeSpec,
    dtype: torch.dtype,
    plan: Callable[..., Plan] = resize_plan,
) -> Tensor:
    """The adjoint of :func:`resample` and the add: the table's gradient (H0, W0, C) from that of the tokens."""
    h0, w0, channels = shape
    dtype, device = torch.promote_types(dtype, tokens.in_grid[0].dtype), tokens.in_grid[0].device
    grad = torch.zeros(h0 * w0, channels, dtype=dtype, device=device)
    for same_height in _by_height(groups, how):
        strip, along_y = None, None
        for group in same_height:
            cells = tokens.sum(group, dtype)
            sums = plan(group.h, group.w, (h0, w0), how, True, dtype, device)
            if len(sums) == 2:
                part, along_y = sums[0](cells), sums[1]
                strip = part if strip is None else strip.add_(part)
            elif not sums:
                grad += cells
            elif sums[0].rows is None:
                grad += sums[0](cells)
            else:
                grad.index_add_(0, sums[0].rows, sums[0](cells))
        if strip is not None and along_y is not None:
            grad += along_y(strip.view(-1, w0 * channels)).view(-1, channels)
    return grad.view(h0, w0, channels)


def line_sum(
    axis: int, h: int, w: int, n0: int, how: ResizeSpec, adjoint: bool, dtype: torch.dtype, device: torch.device
) -> SparseSum | None:
    """The sparse sum that resizes a 1-D table of N0 cells along an axis of the grid (h, w); None where sizes match."""
    if how.sampler == "interpolate" and how.lengths(h, w)[axis] == n0:
        return None
    matrix = axis_matrix(axis, h, w, n0, how, dtype)
    column = torch.zeros(1, 1, dtype=torch.int64, device="cpu"), torch.ones(1, 1, dtype=dtype, device="cpu")
    return _sparse_sum(taps(matrix.t() if adjoint else matrix), column, 1).to(device)


def resample_lines(
    tables: tuple[Tensor, ...],
    groups: list[Group],
    how: ResizeSpec,
    token_dtype: torch.dtype,
    dtype: torch.dtype,
    plan: Callable[..., SparseSum | None] = line_sum,
) -> Iterator[tuple[Group, Tensor]]:
    """Each group with its cells of a factorized table: ``y + x`` of two 1-D tables, resized, cast to the tokens' dtype.

    timm casts both before it adds them, and so do we.
    """
    for group in groups:
        lines = []
        for axis, table in enumerate(tables):
            sums = plan(axis, group.h, group.w, len(table), how, False, dtype, table.device)
            line = table.detach() if sums is None else sums(table.detach().to(dtype).contiguous())
            lines.append(line[: (group.h, group.w)[axis]].to(token_dtype))
        yield group, (lines[0][:, None] + lines[1][None]).flatten(0, 1)


def line_gradients(
    tokens: Tokens,
    lengths: Sequence[int],
    groups: list[Group],
    how: ResizeSpec,
    dtype: torch.dtype,
    plan: Callable[..., SparseSum | None] = line_sum,
) -> tuple[Tensor, ...]:
    """The adjoint of :func:`resample_lines` and the add: the gradients (H0, C) and (W0, C) of the two tables."""
    first = tokens.in_grid[0]
    dtype = torch.promote_types(dtype, first.dtype)
    grads = tuple(torch.zeros(n0, first.shape[-1], dtype=dtype, device=first.device) for n0 in lengths)
    for group in groups:
        cells = tokens.sum(group, dtype).view(group.h, group.w, -1)
        for axis, grad in enumerate(grads):
            line = cells.sum(1 - axis)  # a row of y is read by all columns, and the other way round
            sums = plan(axis, group.h, group.w, len(grad), how, True, dtype, first.device)
            if sums is None:
                grad[: len(line)] += line
            else:
                grad += sums(line)
    return grads


def _by_height(groups: list[Group], how: ResizeSpec) -> list[list[Group]]:
    """The groups whose grids have the same A_h: the same height, resized to the same length."""
    heights: dict[tuple[int, int], list[Group]] = {}
    for group in groups:
        heights.setdefault((how.lengths(group.h, group.w)[0], group.h), []).append(group)
    return list(heights.values())


def _sparse_sum(y: tuple[Tensor, Tensor], x: tuple[Tensor, Tensor], source_width: int) -> SparseSum:
    """One sum for each pair of rows, of ``y`` and of ``x``: the products of their taps, on row-major cells."""
    index = (y[0][:, None, :, None] * source_width + x[0][None, :, None, :]).flatten(2).flatten(0, 1)
    weights = (y[1][:, None, :, None] * x[1][None, :, None, :]).flatten(2).flatten(0, 1)
    counts = weights.count_nonzero(1)
    read = weights.flatten().nonzero()[:, 0]
    offsets = (counts.cumsum(0) - counts).to(torch.int32)
    return SparseSum(index.flatten()[read].to(torch.int32), offsets, weights.flatten()[read])


def _few_rows(sums: SparseSum) -> SparseSum:
    """Without the empty sums, if they are more than half: a small grid reads few cells of a large table."""
    ends = torch.cat((sums.offsets[1:], sums.offsets.new_tensor([len(sums.reads)])))
    rows = (ends > sums.offsets).nonzero()[:, 0]
    if 2 * len(rows) > len(sums.offsets):
        return sums
    return SparseSum(sums.reads, sums.offsets[rows], sums.weights, rows)
