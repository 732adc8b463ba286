"""``embedding(h, w) = A_h . P . A_w^T`` and its transpose, as sums of few rows.

This is what the strategy "matmul" runs. A resize matrix is a narrow band: a cell of the grid reads
at most 2 (bilinear) or 4 (bicubic) cells of the table on each axis, more where antialiasing shrinks
the table, and the rest of the matrix is zero. So no product of matrices runs here. Each product is
a *sparse sum*: every row of the result adds up the few source rows that it reads, each times its
weight. ``torch.embedding_bag`` does that in float32 at least; neither autocast nor TF32 can round
it.

Forward, for each distinct height h and each grid (h, w) of that height::

    after_y    = A_h . P             (h, W0, C)      once for each height
    embeddings = after_y . A_w^T     (h, w, C)       once for each grid

Where it costs less, as for most bilinear tables, one sparse sum takes both axes
(``both_axes_together``). Bilinear tables without antialiasing (and not ``ar_preserving``) go to
``F.interpolate``, which reads only what it needs.

Backward, in the reverse order::

    embeddings' = sum of the tokens' gradients over the samples of a grid
    after_y'    = sum of (embeddings' . A_w) over the grids of a height
    P'          = sum of (A_h^T . after_y') over the heights

Each of these three sums is taken in pairs, of 16 tensors at most: thousands of float32 numbers
added one after the other would be wrong by 1e-5.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .dense import Embeddings
from .kept import kept_by_arguments
from .matrices import Taps, axis_taps, interpolate
from .pairwise_sum import PairwiseSum
from .spec import ResizeSpec, Size


class SparseSum(NamedTuple):
    """Sums of few rows of a source, each row times its weight.

    Row k of the result is the sum of ``source[indices[i]] * weights[i]``, i from ``offsets[k]`` to
    the next offset. ``rows``: where few rows of the result are not zero, only these are computed,
    and this names them.
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

    def to(self, device: torch.device) -> "SparseSum":
        """The same sums of a source on ``device``."""
        rows = None if self.rows is None else self.rows.to(device)
        return SparseSum(
            self.indices.to(device), self.offsets.to(device), self.weights.to(device), rows
        )


ResizeSteps = tuple[SparseSum, ...]
"""The sparse sums from table to grid (or back), one after the other.

They are two, or one for both axes, or none: a copy.
"""

kept_taps = kept_by_arguments("axis taps")(axis_taps)


@kept_by_arguments("resize steps")
def resize_steps(
    h: int,
    w: int,
    table_size: Size,
    spec: ResizeSpec,
    transpose: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> ResizeSteps:
    """The steps from a table to a grid (h, w); with ``transpose`` those of the transposed map."""
    if spec.takes_table_itself((h, w), table_size):
        return ()
    h0, w0 = table_size
    height, width = spec.resized_size(h, w)
    longest_h, longest_w = spec.batch_max
    y = kept_taps(h, height, h0, spec, longest_h, dtype, transpose)
    x = kept_taps(w, width, w0, spec, longest_w, dtype, transpose)
    steps = _backward_steps(y, x, (h, w), w0) if transpose else _forward_steps(y, x, (h, w), w0)
    if device.type == "cpu":
        return steps
    return tuple(step.to(device) for step in steps)


# A_h (x) A_w = (I (x) A_w) (A_h (x) I), and A_h (x) I takes whole rows of the table as one cell.


def _forward_steps(y: Taps, x: Taps, grid: Size, w0: int) -> ResizeSteps:
    """Along y and then along x, from a table that is ``w0`` wide to a grid."""
    if both_axes_together(y.reads, x.reads, grid, w0):
        return (_kron_of_one_length(y, x, source_width=w0),)
    along_y = _kron_of_one_length(y, _identity(1, y), source_width=1)
    along_x = _kron_of_one_length(_identity(grid[0], x), x, source_width=w0)
    return along_y, along_x


def _backward_steps(y: Taps, x: Taps, grid: Size, w0: int) -> ResizeSteps:
    """Along x and then along y, from a grid to a table that is ``w0`` wide."""
    h, w = grid
    if both_axes_together(y.reads, x.reads, grid, w0):
        return (_without_empty_rows(_kron_of_own_taps(y, x, source_width=w)),)
    along_x = _kron_of_own_taps(_identity(h, x), x, source_width=w)
    along_y = _kron_of_own_taps(y, _identity(1, y), source_width=1)
    return along_x, along_y


def both_axes_together(reads_y: int, reads_x: int, grid: Size, w0: int) -> bool:
    """Whether to sum over both axes in one step instead of one axis after the other.

    ``reads_y`` and ``reads_x`` count the cells that A_h and A_w read. Together, each cell reads the
    product of its taps. One after the other, the h*W0 cells between them are written and read.
    Writing a cell costs as much as reading four, and one more call as much as reading 400 (measured
    on 2 CPU cores, C=768). So bilinear tables are summed together and bicubic ones mostly are not,
    which takes 0.73 to 0.87 of the time. Never together with more than 16 taps: one long float32
    sum rounds more than timm's two short ones.
    """
    h, w = grid
    together = reads_y * reads_x
    if together > 16 * h * w:
        return False
    one_by_one = reads_y * w0 + h * reads_x
    return together <= one_by_one + 4 * h * w0 + 400


def resample(
    table: Tensor, sizes: Iterable[Size], spec: ResizeSpec, dtype: torch.dtype
) -> Embeddings:
    """The embeddings of each size from a table ([1,] H0, W0, C), in ``dtype``.

    Those of the table's own size are the table itself, not converted.
    """
    h0, w0, channels = table.shape[-3:]
    flat = table.reshape(-1, channels).contiguous()  # (H0*W0, C)
    to_sum = []
    for size in sizes:
        if spec.takes_table_itself(size, (h0, w0)):
            yield size, flat
        elif _is_quick_by_pytorch(spec):
            yield size, interpolate(table, size, spec, dtype).flatten(0, 2)
        else:
            to_sum.append(size)
    if not to_sum:
        return

    source = flat.to(dtype)
    table_rows = source.view(h0, -1)  # a row of the table as one long row (W0*C)
    for same_height in _by_height(to_sum, spec):
        after_y = None  # (h*W0, C), shared by all grids of this height
        for h, w in same_height:
            steps = resize_steps(h, w, (h0, w0), spec, False, dtype, table.device)
            if len(steps) == 1:
                yield (h, w), steps[0](source)
                continue
            along_y, along_x = steps
            if after_y is None:
                after_y = along_y(table_rows).view(-1, channels)
            yield (h, w), along_x(after_y)


def gradient(
    sizes: Iterable[Size],
    gradient_of: Callable[[Size], Tensor],
    table_shape: Sequence[int],
    spec: ResizeSpec,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The transpose of :func:`resample`: the gradient of a table, of shape (H0, W0, C).

    ``gradient_of(size)`` gives the gradient (h*w, C) of the embeddings of a size in ``dtype``,
    which is not written to.
    """
    h0, w0, channels = table_shape
    total = PairwiseSum(h0 * w0, dtype)
    for same_height in _by_height(sizes, spec):
        h = same_height[0][0]
        after_y = PairwiseSum(h * w0, dtype)
        along_y = None
        for size in same_height:
            steps = resize_steps(*size, (h0, w0), spec, True, dtype, device)
            summed = gradient_of(size)
            if len(steps) == 2:
                along_x, along_y = steps
                after_y.add(along_x(summed))
            elif len(steps) == 1 and steps[0].rows is None:
                total.add(steps[0](summed))
            elif len(steps) == 1:
                total.accumulate(steps[0](summed), steps[0].rows)
            else:  # a grid of the table's own size
                total.accumulate(summed)
        if along_y is not None:
            long_rows = after_y.total().view(-1, w0 * channels)  # (h, W0*C)
            total.add(along_y(long_rows).view(-1, channels))
    return total.total().view(h0, w0, channels)


def _is_quick_by_pytorch(spec: ResizeSpec) -> bool:
    """Whether ``F.interpolate`` reads only the cells that it needs, all channels of one at once.

    It takes 0.81 to 0.9 of the time that the sums take.
    """
    is_plain = not (spec.antialias or spec.ar_preserving)
    return spec.interpolation == "bilinear" and is_plain and not spec.use_grid_sample


def _by_height(sizes: Iterable[Size], spec: ResizeSpec) -> list[list[Size]]:
    """The sizes with the same A_h: of the same height, resized to the same length.

    They share the sum along y, which takes 0.6 of the time where grids are diverse.

    >>> _by_height([(3, 4), (5, 5), (3, 7)], ResizeSpec())
    [[(3, 4), (3, 7)], [(5, 5)]]
    """
    heights: dict[Size, list[Size]] = {}
    for h, w in sizes:
        length, _ = spec.resized_size(h, w)
        heights.setdefault((length, h), []).append((h, w))
    return list(heights.values())


def _identity(n: int, like: Taps) -> Taps:
    """The taps of an identity matrix."""
    columns = np.arange(n, dtype=np.int32)[:, None]
    ones = np.ones((n, 1), like.weights.dtype)
    return Taps(columns, ones, ones.astype(bool), n)


# ``Y (x) X`` by the taps of both, on the cells of a row-major source that is ``source_width`` wide:
# one sum for each pair of rows. Its taps, (h, w, Ky*Kx), are all pairs of the taps of these rows.


def _kron_of_one_length(y: Taps, x: Taps, source_width: int) -> SparseSum:
    """``Y (x) X`` as sums of one length, quick to make for a new grid: some add a weight of 0."""
    columns, weights = _kron_taps(y, x, source_width)
    offsets = np.arange(0, columns.size, columns.shape[2], dtype=np.int32)
    return _sparse_sum(columns.ravel(), offsets, weights.ravel())


def _kron_of_own_taps(y: Taps, x: Taps, source_width: int) -> SparseSum:
    """``Y (x) X`` as sums of the rows' own taps alone."""
    columns, weights = _kron_taps(y, x, source_width)
    is_own = _pairs_of_y(y.is_own, x) & _pairs_of_x(x.is_own, y)  # (h, w, Ky*Kx)
    counts = is_own.sum(2).ravel()
    offsets = (counts.cumsum() - counts).astype(np.int32)
    return _sparse_sum(columns[is_own], offsets, weights[is_own])


def _kron_taps(y: Taps, x: Taps, source_width: int) -> tuple[Any, Any]:
    """The columns and the weights of ``Y (x) X``, both (h, w, Ky*Kx)."""
    row_starts = y.columns * np.int32(source_width)
    columns = _pairs_of_y(row_starts, x) + _pairs_of_x(x.columns, y)
    weights = _pairs_of_y(y.weights, x) * _pairs_of_x(x.weights, y)
    return columns, weights


def _pairs_of_y(of_y: Any, x: Taps) -> Any:
    """What belongs to the taps of y, (h, Ky), for all pairs of taps: (h, 1, Ky*Kx)."""
    return of_y.repeat(x.columns.shape[1], 1)[:, None]


def _pairs_of_x(of_x: Any, y: Taps) -> Any:
    """What belongs to the taps of x, (w, Kx), for all pairs of taps: (w, Ky*Kx)."""
    return np.concatenate([of_x] * y.columns.shape[1], 1)


def _sparse_sum(indices: Any, offsets: Any, weights: Any) -> SparseSum:
    """A sum from NumPy's arrays."""
    return SparseSum(*map(torch.from_numpy, (indices, offsets, weights)))


def _without_empty_rows(sums: SparseSum) -> SparseSum:
    """The sums that are not empty, if these are at most half: then training takes 0.45 of the time.

    A small grid reads few cells of a large table: 10 x 10 at most 400 of RADIO's 16,384.
    """
    ends = torch.cat((sums.offsets[1:], sums.offsets.new_tensor([len(sums.indices)])))
    rows = (ends > sums.offsets).nonzero()[:, 0]
    if 2 * len(rows) > len(sums.offsets):
        return sums
    return SparseSum(sums.indices, sums.offsets[rows], sums.weights, rows)
