"""``embedding(h, w) = A_h . P . A_w^T`` and its transpose, as sums of few rows: what the strategy "matmul" runs.

A resize matrix is a narrow band: a cell of the grid reads at most 2 (bilinear) or 4 (bicubic) cells of the table on
each axis, more where antialiasing shrinks the table, and the rest of the matrix is zero. So no product of matrices runs
here. Each product is a *sparse sum*: every row of the result adds up the few source rows that it reads, each times its
weight. ``torch.embedding_bag`` does that in float32 at least; neither autocast nor TF32 can round it.

Forward, for each distinct height h and each grid (h, w) of that height::

    strip      = A_h . P           (h, W0, C)      once for each height
    embeddings = strip . A_w^T     (h, w, C)       once for each grid, and added to the tokens of its samples

Where it costs less, as for most bilinear tables, one sparse sum takes both axes (``both_axes_together``).

Backward, in the reverse order. The gradient of the tokens passes through untouched, and ``g`` is read once::

    embeddings' = sum of g over the samples of a grid
    strip'      = sum of (embeddings' . A_w) over the grids of a height
    P'          = sum of (A_h^T . strip') over the heights

Each of these three sums is taken in pairs, of blocks of 16 at most: thousands of float32 numbers added one after the
other would be wrong by 1e-5.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache import cached
from .grids import Batch, GridGroup
from .matrices import ResizeSpec, axis_matrix, taps
from .tokens import IN_A_ROW, PairwiseSum, Tokens


class SparseSum(NamedTuple):
    """Row k of the result is the sum of ``source[indices[i]] * weights[i]``, i from ``offsets[k]`` to the next offset.

    ``rows``: where few rows of the result are not zero, only these are computed, and this names them.
    """

    indices: Tensor
    offsets: Tensor
    weights: Tensor
    rows: Tensor | None = None

    def __call__(self, source: Tensor) -> Tensor:
        """The sums (rows, C) of a source (R, C)."""
        weights = self.weights.to(source.dtype)
        return torch.embedding_bag(source, self.indices, self.offsets, False, 0, False, weights)[0]

    def to(self, device: torch.device) -> SparseSum:
        """The same sum on another device."""
        return SparseSum._make(None if part is None else part.to(device) for part in self)


ResizeSteps = tuple[SparseSum, ...]
"""The sparse sums from table to grid (or back), one after the other: two, or one for both axes, or none: a copy."""


@cached("resize steps")
def resize_steps(
    h: int, w: int, size: tuple[int, int], spec: ResizeSpec, transpose: bool, dtype: torch.dtype, device: torch.device
) -> ResizeSteps:
    """The steps from a table of a ``size`` to a grid (h, w); with ``transpose`` those of the transposed map, back."""
    h0, w0 = size
    if spec.copies_own_size and (h, w) == (h0, w0):
        return ()
    a_h, a_w = axis_matrix(0, h, w, h0, spec, dtype), axis_matrix(1, h, w, w0, spec, dtype)
    together = both_axes_together(int(a_h.count_nonzero()), int(a_w.count_nonzero()), (h, w), w0)
    y, x = (taps(a.t() if transpose else a) for a in (a_h, a_w))
    if together:
        both = _kron(y, x, w if transpose else w0)
        steps: ResizeSteps = (_drop_empty_rows(both) if transpose else both,)
    else:  # A_h (x) A_w = (I (x) A_w) (A_h (x) I), and A_h (x) I takes whole rows of the table as one cell
        along_y = _kron(y, _identity(1, dtype), 1)
        along_x = _kron(_identity(h, dtype), x, w if transpose else w0)
        steps = (along_x, along_y) if transpose else (along_y, along_x)
    return tuple(step.to(device) for step in steps)


def both_axes_together(nnz_y: int, nnz_x: int, grid: tuple[int, int], w0: int) -> bool:
    """Whether to sum over both axes in one step instead of one axis after the other.

    ``nnz_y`` and ``nnz_x`` count the non-zeros of A_h and A_w. Together, each cell reads the product of its taps. One
    after the other, the strip of h*W0 cells is written and read in between. Writing a cell costs as much as reading
    four, and one more call as much as reading 400 (measured on 2 CPU cores, C=768). So bilinear tables are summed
    together and bicubic ones mostly are not. Never together with more than 16 taps: one long float32 sum rounds more
    than timm's two short ones.
    """
    h, w = grid
    if nnz_y * nnz_x > 16 * h * w:
        return False
    return nnz_y * nnz_x <= nnz_y * w0 + h * nnz_x + 4 * h * w0 + 400


def resample_learned(table: Tensor, batch: Batch) -> Iterator[tuple[GridGroup, Tensor]]:
    """Each group with its embeddings: the table (H0, W0, C) resampled to its grid, (h*w, C), in ``batch.dtype``.

    If the sizes match, they are the table itself, not converted.
    """
    size, channels, spec, dtype = (table.shape[0], table.shape[1]), table.shape[2], batch.spec, batch.dtype
    own = table.detach().reshape(-1, channels).contiguous()
    others = []
    for group in batch.groups:
        if spec.copies_own_size and (group.h, group.w) == size:
            yield group, own
        else:
            others.append(group)
    flat = own.to(dtype) if others else own
    for same_height in _group_by_height(others, spec) if others else ():
        strip = None
        for group in same_height:
            steps = resize_steps(group.h, group.w, size, spec, False, dtype, table.device)
            if len(steps) == 1:
                yield group, steps[0](flat)
            else:  # a row of the table is one long row (W0*C) for the sum along y
                strip = steps[0](flat.view(size[0], -1)).view(-1, channels) if strip is None else strip
                yield group, steps[1](strip)


def learned_gradient(tokens: Tokens, shape: Sequence[int], batch: Batch) -> Tensor:
    """The transpose of :func:`resample_learned` and the add: the table's gradient (H0, W0, C) from the tokens'."""
    h0, w0, channels = shape
    spec, dtype, device = batch.spec, torch.promote_types(batch.dtype, tokens.dtype), tokens.device
    total = PairwiseSum()
    block, in_block = None, 0  # the grids that take one step (or none) add into a table of their own, 16 at a time
    for same_height in _group_by_height(batch.groups, spec):
        strips, along_y = PairwiseSum(), None
        for group in same_height:
            summed = tokens.sum(group, dtype)
            steps = resize_steps(group.h, group.w, (h0, w0), spec, True, dtype, device)
            if len(steps) == 2:
                strips.add(steps[0](summed))
                along_y = steps[1]
                continue
            if block is None:
                block = torch.zeros(h0 * w0, channels, dtype=dtype, device=device)
            if steps and steps[0].rows is not None:
                block.index_add_(0, steps[0].rows, steps[0](summed))
            else:
                block += steps[0](summed) if steps else summed
            in_block += 1
            if in_block == IN_A_ROW:
                total.add(block)
                block, in_block = None, 0
        if along_y is not None:
            total.add(along_y(strips.total().view(-1, w0 * channels)).view(-1, channels))
    if block is not None:
        total.add(block)
    return total.total().view(h0, w0, channels)


@cached("axis sums")
def axis_sum(
    axis: int, h: int, w: int, n0: int, spec: ResizeSpec, transpose: bool, dtype: torch.dtype, device: torch.device
) -> SparseSum | None:
    """The sparse sum that resizes a 1-D table of N0 cells along an axis of the grid (h, w); None where sizes match."""
    if spec.copies_own_size and spec.lengths(h, w)[axis] == n0:
        return None
    matrix = axis_matrix(axis, h, w, n0, spec, dtype)
    return _kron(taps(matrix.t() if transpose else matrix), _identity(1, dtype), 1).to(device)


def resample_factorized(tables: tuple[Tensor, ...], batch: Batch) -> Iterator[tuple[GridGroup, Tensor]]:
    """Each group with its embeddings of a factorized table: ``y + x`` of two 1-D tables, resized, in the tokens' dtype.

    timm casts both before it adds them, and so do we.
    """
    for group in batch.groups:
        axes = []
        for axis, table in enumerate(tables):
            resize = axis_sum(axis, group.h, group.w, len(table), batch.spec, False, batch.dtype, table.device)
            resized = table.detach() if resize is None else resize(table.detach().to(batch.dtype).contiguous())
            axes.append(resized[: (group.h, group.w)[axis]].to(batch.token_dtype))
        yield group, (axes[0][:, None] + axes[1][None]).flatten(0, 1)


def factorized_gradients(tokens: Tokens, lengths: Sequence[int], batch: Batch) -> tuple[Tensor, ...]:
    """The transpose of :func:`resample_factorized` and the add: the gradients (H0, C) and (W0, C) of the two tables."""
    dtype = torch.promote_types(batch.dtype, tokens.dtype)
    totals = tuple(PairwiseSum() for _ in lengths)
    for group in batch.groups:
        summed = tokens.sum(group, dtype).view(group.h, group.w, -1)
        for axis, (n0, total) in enumerate(zip(lengths, totals)):
            line = summed.sum(1 - axis)  # a row of y is read by all columns, and the other way round
            resize = axis_sum(axis, group.h, group.w, n0, batch.spec, True, dtype, tokens.device)
            total.add(F.pad(line, (0, 0, 0, n0 - len(line))) if resize is None else resize(line))
    return tuple(total.total() for total in totals)


def _group_by_height(groups: list[GridGroup], spec: ResizeSpec) -> Iterable[list[GridGroup]]:
    """The groups whose grids have the same A_h: the same height, resized to the same length."""
    heights: dict[tuple[int, int], list[GridGroup]] = {}
    for group in groups:
        heights.setdefault((spec.lengths(group.h, group.w)[0], group.h), []).append(group)
    return heights.values()


def _identity(n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The taps of an identity matrix."""
    return torch.arange(n, device="cpu")[:, None], torch.ones(n, 1, dtype=dtype, device="cpu")


def _kron(y: tuple[Tensor, Tensor], x: tuple[Tensor, Tensor], source_width: int) -> SparseSum:
    """``Y (x) X``, by the ``taps`` of both, on the cells of a row-major source: one sum for each pair of rows."""
    index = (y[0][:, None, :, None] * source_width + x[0][None, :, None, :]).flatten(2).flatten(0, 1)
    weights = (y[1][:, None, :, None] * x[1][None, :, None, :]).flatten(2).flatten(0, 1)
    taken = weights != 0
    counts = taken.sum(1)
    return SparseSum(index[taken].to(torch.int32), (counts.cumsum(0) - counts).to(torch.int32), weights[taken])


def _drop_empty_rows(sums: SparseSum) -> SparseSum:
    """Without the empty sums, if they are more than half: a small grid reads few cells of a large table."""
    ends = torch.cat((sums.offsets[1:], sums.offsets.new_tensor([len(sums.indices)])))
    rows = (ends > sums.offsets).nonzero()[:, 0]
    if 2 * len(rows) > len(sums.offsets):
        return sums
    return SparseSum(sums.indices, sums.offsets[rows], sums.weights, rows)
