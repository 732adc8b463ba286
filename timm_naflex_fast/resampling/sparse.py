"""``embedding(h, w) = A_h . P . A_w^T`` and its transpose, as sums of few rows: what the strategy
"matmul" runs.

A resize matrix is a narrow band: a cell of the grid reads at most 2 (bilinear) or 4 (bicubic) cells
of the table on each axis, more where antialiasing shrinks the table, and the rest of the matrix is
zero. So no product of matrices runs here. Each product is a *sparse sum*: every row of the result
adds up the few source rows that it reads, each times its weight. ``torch.embedding_bag`` does that
in float32 at least; neither autocast nor TF32 can round it.

Forward, for each distinct height h and each grid (h, w) of that height::

    after_y    = A_h . P             (h, W0, C)      once for each height
    embeddings = after_y . A_w^T     (h, w, C)       once for each grid, and added to the tokens of its samples

Where it costs less, as for most bilinear tables, one sparse sum takes both axes
(``both_axes_together``). Bilinear tables without antialiasing (and not ``ar_preserving``) go to
``F.interpolate``, which reads only what it needs.

Backward, in the reverse order. The gradient of the tokens passes through untouched, and ``g`` is
read once::

    embeddings' = sum of g over the samples of a grid
    after_y'    = sum of (embeddings' . A_w) over the grids of a height
    P'          = sum of (A_h^T . after_y') over the heights

Each of these three sums is taken in pairs, of 16 tensors at most: thousands of float32 numbers
added one after the other would be wrong by 1e-5.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..batch.grids import GridGroup, ResamplePlan
from ..batch.tokens import PairwiseSum, Tokens
from . import dense
from .kept import cached
from .matrices import ResizeSpec, Size, Taps, axis_taps, interpolate


class SparseSum(NamedTuple):
    """Row k of the result is the sum of ``source[indices[i]] * weights[i]``, i from ``offsets[k]``
    to the next offset.

    ``rows``: where few rows of the result are not zero, only these are computed, and this names
    them.
    """

    indices: Tensor
    offsets: Tensor
    weights: Tensor
    rows: Tensor | None = None

    def __call__(self, source: Tensor) -> Tensor:
        """The sums (rows, C) of a source (R, C)."""
        return torch.embedding_bag(
            source, self.indices, self.offsets, per_sample_weights=self.weights
        )[0]


ResizeSteps = tuple[SparseSum, ...]
"""The sparse sums from table to grid (or back), one after the other: two, or one for both axes, or
none: a copy."""
cached_taps = cached("axis taps")(axis_taps)


@cached("resize steps")
def resize_steps(
    h: int,
    w: int,
    table_size: Size,
    spec: ResizeSpec,
    transpose: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> ResizeSteps:
    """The steps from a table to a grid (h, w); with ``transpose`` those of the transposed map,
    back."""
    h0, w0 = table_size
    if not spec.use_grid_sample and (h, w) == (h0, w0):
        return ()
    y, x = (
        cached_taps(keep, n, n0, spec, batch_max, dtype, transpose)
        for keep, n, n0, batch_max in zip(
            (h, w), spec.resized_size(h, w), table_size, spec.batch_max
        )
    )
    if both_axes_together(y.reads, x.reads, (h, w), w0):
        both = _kron(y, x, w if transpose else w0, transpose)
        steps: ResizeSteps = (_drop_empty_rows(both) if transpose else both,)
    else:  # A_h (x) A_w = (I (x) A_w) (A_h (x) I), and A_h (x) I takes whole rows of the table as one cell
        along_y = _kron(y, _identity(1, y), 1, transpose)
        along_x = _kron(_identity(h, x), x, w if transpose else w0, transpose)
        steps = (along_x, along_y) if transpose else (along_y, along_x)
    on_device = (
        SparseSum._make(part if part is None else part.to(device) for part in step)
        for step in steps
    )
    return steps if device.type == "cpu" else tuple(on_device)


def both_axes_together(reads_y: int, reads_x: int, grid: tuple[int, int], w0: int) -> bool:
    """Whether to sum over both axes in one step instead of one axis after the other.

    ``reads_y`` and ``reads_x`` count the cells that A_h and A_w read. Together, each cell reads the
    product of its taps. One after the other, the h*W0 cells between them are written and read.
    Writing a cell costs as much as reading four, and one more call as much as reading 400 (measured
    on 2 CPU cores, C=768). So bilinear tables are summed together and bicubic ones mostly are not.
    Never together with more than 16 taps: one long float32 sum rounds more than timm's two short
    ones.
    """
    h, w = grid
    if reads_y * reads_x > 16 * h * w:
        return False
    return reads_y * reads_x <= reads_y * w0 + h * reads_x + 4 * h * w0 + 400


def resample(tables: tuple[Tensor, ...], plan: ResamplePlan) -> Iterator[tuple[GridGroup, Tensor]]:
    """Each group with its embeddings (h*w, C): of one table in ``plan.dtype``, of two in the
    tokens' dtype.

    If the sizes match, the embeddings are the table itself, not converted.
    """
    if len(tables) == 2:
        yield from dense.resample(tables, plan)
        return
    (table,), spec, dtype = tables, plan.spec, plan.dtype
    table_size, channels, device = (table.shape[-3], table.shape[-2]), table.shape[-1], table.device
    flat = table.reshape(-1, channels).contiguous()  # (H0*W0, C)
    # Here ``F.interpolate`` itself reads only the cells that it needs, all channels of a cell at
    # once.
    by_pytorch = spec.interpolation == "bilinear" and not (spec.antialias or spec.ar_preserving)
    to_resize = []
    for group in plan.groups:
        if not spec.use_grid_sample and (group.h, group.w) == table_size:
            yield group, flat
        elif by_pytorch and not spec.use_grid_sample:
            yield group, interpolate(table, (group.h, group.w), spec, dtype).flatten(0, 2)
        else:
            to_resize.append(group)
    flat = flat.to(dtype) if to_resize else flat
    for same_height in _group_by_height(to_resize, spec):
        after_y = None
        for group in same_height:
            steps = resize_steps(group.h, group.w, table_size, spec, False, dtype, device)
            if len(steps) == 1:
                yield group, steps[0](flat)
            else:  # a row of the table is one long row (W0*C) for the sum along y
                after_y = (
                    steps[0](flat.view(table_size[0], -1)).view(-1, channels)
                    if after_y is None
                    else after_y
                )
                yield group, steps[1](after_y)


def gradients(tokens: Tokens, shapes: Sequence[Sequence[int]], plan: ResamplePlan) -> list[Tensor]:
    """The transpose of :func:`resample` and the add: the tables' gradients, of these ``shapes``,
    from the tokens'."""
    if len(shapes) == 2:
        return dense.factorized_gradients(tokens, shapes, plan)
    h0, w0, channels = shapes[0]
    spec, dtype, device = plan.spec, torch.promote_types(plan.dtype, tokens.dtype), tokens.device
    total = PairwiseSum()
    for same_height in _group_by_height(plan.groups, spec):
        after_y, along_y = PairwiseSum(), None
        for group in same_height:
            summed = tokens.sum(group, dtype)  # (h*w, C)
            steps = resize_steps(group.h, group.w, (h0, w0), spec, True, dtype, device)
            if len(steps) == 2:
                after_y.add(steps[0](summed))
                along_y = steps[1]
            else:  # ``summed`` may be a view of the tokens
                part, rows = (steps[0](summed), steps[0].rows) if steps else (summed.clone(), None)
                total.accumulate(part, rows, h0 * w0)
        if along_y is not None:
            total.add(along_y(after_y.total().view(-1, w0 * channels)).view(-1, channels))
    return [total.total().view(h0, w0, channels)]


def _group_by_height(groups: list[GridGroup], spec: ResizeSpec) -> Iterable[list[GridGroup]]:
    """The groups whose grids have the same A_h: the same height, resized to the same length."""
    heights: dict[tuple[int, int], list[GridGroup]] = {}
    for group in groups:
        heights.setdefault((spec.resized_size(group.h, group.w)[0], group.h), []).append(group)
    return heights.values()


def _identity(n: int, like: Taps) -> Taps:
    """The taps of an identity matrix."""
    ones = np.ones((n, 1), like.weights.dtype)
    return Taps(np.arange(n, dtype=np.int32)[:, None], ones, ones, n)


def _kron(y: Taps, x: Taps, source_width: int, drop: bool) -> SparseSum:
    """``Y (x) X``, by the taps of both, on the cells of a row-major source: one sum for each pair
    of rows.

    With ``drop`` only a row's own taps stay. Without, all sums are of one length, quicker to make
    for a new grid.
    """
    columns = np.add(*_pairs(y.columns * np.int32(source_width), x.columns))  # (h, w, Ky*Kx)
    weights = np.multiply(*_pairs(y.weights, x.weights))
    if drop:
        is_own = np.logical_and(*_pairs(y.is_own, x.is_own))
        counts = is_own.sum(2).ravel()
        columns, weights, offsets = (
            columns[is_own],
            weights[is_own],
            (counts.cumsum() - counts).astype(np.int32),
        )
    else:
        offsets = np.arange(0, columns.size, columns.shape[2], dtype=np.int32)
    return SparseSum(*(torch.from_numpy(part.ravel()) for part in (columns, offsets, weights)))


def _pairs(of_y: Any, of_x: Any) -> tuple[Any, Any]:
    """What belongs to the taps of each axis, (h, Ky) and (w, Kx), for all pairs: (h, 1, Ky*Kx) and
    (w, Ky*Kx)."""
    return of_y.repeat(of_x.shape[1], 1)[:, None], np.concatenate([of_x] * of_y.shape[1], 1)


def _drop_empty_rows(sums: SparseSum) -> SparseSum:
    """Without the empty sums, if they are more than half: a small grid reads few cells of a large
    table."""
    ends = torch.cat((sums.offsets[1:], sums.offsets.new_tensor([len(sums.indices)])))
    rows = (ends > sums.offsets).nonzero()[:, 0]
    if 2 * len(rows) > len(sums.offsets):
        return sums
    return SparseSum(sums.indices, sums.offsets[rows], sums.weights, rows)
