"""``embedding(h, w) = A_h . P . A_w^T`` and its transpose, as sums of few rows.

This is what the strategies "matmul" and "grid_sample" run. A resize matrix is a narrow band: a cell of the grid reads
at most 2 (bilinear) or 4 (bicubic) cells of the table on each axis, more where antialiasing shrinks
the table, and the rest of the matrix is zero. So no product of matrices runs here. Each product is
a *sparse sum*: every row of the result adds up the few source rows that it reads, each times its
weight. ``torch.embedding_bag`` does that in float32 at least; neither autocast nor TF32 can round
it.

Forward, for each distinct height h and each grid (h, w) of that height::

    after_y    = A_h . P             (h, W0, C)      once for each height
    embeddings = after_y . A_w^T     (h, w, C)       once for each grid

Where it costs less, as for most bilinear tables, one sparse sum takes both axes
(``both_axes_together``).

Backward, in the reverse order::

    embeddings' = sum of the tokens' gradients over the samples of a grid
    after_y'    = sum of (embeddings' . A_w) over the grids of a height
    P'          = sum of (A_h^T . after_y') over the heights

Each of these three sums is taken in blocks (``BlockSum``): thousands of float32 numbers added one
after the other would be wrong by 1e-5.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import kept
from .kept import kept_by_arguments
from .table import PositionTable, ResizeSpec, Size, whole
from .weights import Taps, axis_taps, grid_taps

Embeddings = Iterable[tuple[Size, Tensor]]
"""The size (h, w) of each grid with its embeddings (h*w, C), in any order."""

# So many tensors are added one after the other: thousands would be wrong by 1e-5.
MAX_SEQUENTIAL = 16


class BlockSum:
    """The sum (rows, C) of tensors, as they come: sixteen go to one sum, and PyTorch adds up the
    sums in pairs."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self.rows = rows
        self.dtype = dtype
        self._sums: list[Tensor] = []
        self._parts = 0

    def add(self, part: Tensor, rows: Tensor | None = None, *, is_free: bool = False) -> None:
        """Add one more of any dtype, which is not written to.

        ``rows``: to which rows of the sum those of ``part`` are added, to some perhaps twice (on CUDA
        in no fixed order); None: to the first ones. ``is_free``: nobody else has ``part``, of the
        sum's dtype, so it may become the sum.
        """
        begins = self._parts % MAX_SEQUENTIAL == 0
        self._parts += 1
        if begins and rows is None and len(part) == self.rows:
            # To copy a table's gradient would take a tenth of a training call (measured: one
            # image of 240 tokens, C=768, 2 CPU cores).
            if not is_free:
                part = part.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
            self._sums.append(part)
            return
        if begins:
            self._sums.append(part.new_zeros(self.rows, part.shape[1], dtype=self.dtype))
        newest = self._sums[-1]
        if rows is None:
            newest[: len(part)].add_(part)
        else:
            newest.index_add_(0, rows, part.to(self.dtype))

    def total(self) -> Tensor:
        """The sum of all that came, of one at least."""
        if len(self._sums) == 1:
            return self._sums[0]
        return torch.stack(self._sums).sum(0)


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

    def first(self, share: int, of: int) -> "SparseSum":
        """The first ``share`` of ``of`` equal shares of the sums."""
        taps = self.indices.shape[0] // of * share
        rows = self.offsets.shape[0] // of * share
        return SparseSum(self.indices[:taps], self.offsets[:rows], self.weights[:taps])


def resize_steps(
    size: Size,
    table_size: Size,
    spec: ResizeSpec,
    transpose: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[SparseSum, ...]:
    """The sums from a table to a grid of this size, one after the other: two, or one for both axes,
    or none, a copy. With ``transpose`` those of the transposed map."""
    if size == spec.own_size(table_size):
        return ()
    h, w = size
    h0, w0 = table_size
    height, width = spec.resized_size(h, w)
    # A_h (x) A_w = (I (x) A_w) (A_h (x) I), and A_h (x) I takes whole rows of the table as one cell.
    along_y = _axis_sum(h, height, h0, spec, dtype, transpose, device, 1)
    # Grids of one width share I (x) A_w, made for so many lines that most need not make another.
    lines = 1 << (h - 1).bit_length()
    along_x = _axis_sum(w, width, w0, spec, dtype, transpose, device, lines)
    reads_y = along_y.indices.shape[0]
    reads_x = along_x.indices.shape[0] // lines
    if both_axes_together(reads_y, reads_x, size, w0):
        return (_both_axes(size, table_size, spec, dtype, transpose, device),)
    if h < lines:
        along_x = along_x.first(h, lines)
    return (along_x, along_y) if transpose else (along_y, along_x)


@kept_by_arguments
def _axis_sum(
    keep: int,
    n: int,
    n0: int,
    spec: ResizeSpec,
    dtype: torch.dtype,
    transpose: bool,
    device: torch.device,
    lines: int,
) -> SparseSum:
    """The sums of an axis's taps in each of so many lines, line after line; see ``axis_taps``."""
    taps = axis_taps(keep, n, n0, spec, dtype, transpose)
    line = np.arange(lines, dtype=np.int32)[:, None]
    columns = line * taps.shape[1] + taps.columns
    offsets = line * len(taps.columns) + taps.offsets
    return _sum_of_taps(columns, offsets, taps.weights[None].repeat(lines, 0), device)


@kept_by_arguments
def _both_axes(
    size: Size,
    table_size: Size,
    spec: ResizeSpec,
    dtype: torch.dtype,
    transpose: bool,
    device: torch.device,
) -> SparseSum:
    """The sums for both axes at once."""
    y, x = grid_taps(size, table_size, spec, dtype, transpose=transpose)
    return _kron(y, x, device, without_empty_rows=transpose)


# Training, and a batch of many grids, meet most sizes again: 10 us of 350 for one picture, and 7 us
# for each grid of a batch. Of one new picture the steps are not kept, which would take 16 us of 150.
_kept_steps = kept_by_arguments(resize_steps)


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
    table: PositionTable, sizes: Collection[Size], spec: ResizeSpec, dtype: torch.dtype
) -> Embeddings:
    """The embeddings of each size for tokens of ``dtype``: in float32, or float64 for float64."""
    dtype = torch.promote_types(dtype, torch.float32)
    if len(table) == 2:

        def resized(lines: Tensor, length: int) -> Tensor:
            n0 = lines.shape[0]
            along = _axis_sum(length, length, n0, spec, dtype, False, lines.device, 1)
            return along(lines)

        tables = [lines.flatten(0, -2).to(dtype) for lines in table]
        yield from added_lines(tables, sizes, spec, dtype, resized)
        return

    steps_of = _kept_steps if len(sizes) > 1 else resize_steps
    cells = whole(table)
    h0, w0, channels = cells.shape
    source = cells.flatten(0, 1).contiguous().to(dtype)  # (H0*W0, C)
    # Grids of one height share the sum along y.
    for same_height in _by_height(sizes, spec):
        after_y = None  # (h*W0, C), shared by all grids of this height
        for size in same_height:
            steps = steps_of(size, (h0, w0), spec, False, dtype, source.device)
            if not steps:  # a grid of the table's own size
                yield size, source
            elif len(steps) == 1:
                yield size, steps[0](source)
            else:
                along_y, along_x = steps
                # Only when the first of them needs it: the others may sum both axes at once.
                if after_y is None:
                    table_rows = source.view(h0, -1)  # a row of the table as one long row (W0*C)
                    after_y = along_y(table_rows).view(-1, channels)
                yield size, along_x(after_y)


def added_lines(
    tables: Sequence[Tensor],
    sizes: Iterable[Size],
    spec: ResizeSpec,
    dtype: torch.dtype,
    resize: Callable[[Tensor, int], Tensor],
) -> Embeddings:
    """The embeddings of each size in ``dtype`` from two tables (H0, C) and (W0, C) of lines.

    ``resize(lines, length)`` gives ``length`` lines in ``dtype``. timm keeps a table of that length.
    """
    of_lengths = [{lines.shape[0]: lines.to(dtype)} for lines in tables]
    for size in sizes:
        parts = []
        for lines, of_length, keep, length in zip(
            tables, of_lengths, size, spec.resized_size(*size)
        ):
            resized = of_length.get(length)
            if resized is None:
                resized = resize(lines, length)
                of_length[length] = resized
            if keep < length:
                resized = resized[:keep]
            parts.append(resized)
        y, x = parts  # (h, C), (w, C)
        yield size, (y.unsqueeze(1) + x).flatten(0, 1)


def gradient(
    sizes: Iterable[Size],
    gradient_of: Callable[[Size], Tensor],
    shape: Sequence[int],
    spec: ResizeSpec,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The transpose of :func:`resample`: the gradient of a table of this shape, (H0, W0, C).

    ``gradient_of(size)`` gives the gradient (h*w, C) of the embeddings of a size in ``dtype``,
    which is not written to.
    """
    h0, w0, channels = shape
    total = BlockSum(h0 * w0, dtype)
    for same_height in _by_height(sizes, spec):
        h = same_height[0][0]
        after_y = BlockSum(h * w0, dtype)
        along_y = None
        for size in same_height:
            steps = _kept_steps(size, (h0, w0), spec, True, dtype, device)
            # A view of the tokens' gradient, perhaps: so none of the sums below writes into it.
            summed = gradient_of(size)
            if len(steps) == 2:
                along_x, along_y = steps
                after_y.add(along_x(summed), is_free=True)
            elif len(steps) == 1:
                (both,) = steps
                total.add(both(summed), both.rows, is_free=True)
            else:  # a grid of the table's own size
                total.add(summed)
        if along_y is not None:
            long_rows = after_y.total().view(-1, w0 * channels)  # (h, W0*C)
            total.add(along_y(long_rows).view(-1, channels), is_free=True)
    return total.total().view(h0, w0, channels)


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


def _sum_of_taps(columns: Any, offsets: Any, weights: Any, device: torch.device) -> SparseSum:
    """The sums of these taps, row by row: NumPy's arrays of any shape."""
    return SparseSum(
        torch.from_numpy(columns.ravel()).to(device),
        torch.from_numpy(offsets.ravel()).to(device),
        torch.from_numpy(weights.ravel()).to(device),
    )


def _kron(y: Taps, x: Taps, device: torch.device, without_empty_rows: bool = False) -> SparseSum:
    """``Y (x) X`` by the taps of both: a sum for each pair of rows, of all pairs of their taps.

    ``without_empty_rows``: leave out the sums that are empty, if half of them are: then training
    takes 0.45 of the time. A small grid reads few cells of a large table: 10 x 10 at most 400 of
    RADIO's 16,384.
    """
    if y.of_each_row and x.of_each_row:
        return _kron_of_equal_rows(y, x, device)
    # Row (i, j) of the product reads column (k, l) where i reads k and j reads l.
    rows = (y.rows[:, None] * x.shape[0] + x.rows).ravel()  # (Ty*Tx,)
    columns = (y.columns[:, None] * x.shape[1] + x.columns).ravel()
    weights = (y.weights[:, None] * x.weights).ravel()
    # ``embedding_bag`` wants the taps of a row side by side, and where each row begins.
    by_row = rows.argsort(kind="stable")
    counts = np.bincount(rows, minlength=y.shape[0] * x.shape[0])
    offsets = counts.cumsum() - counts

    filled = None
    if without_empty_rows and 2 * np.count_nonzero(counts) <= len(counts):
        (rows_with_taps,) = counts.nonzero()
        offsets = offsets[rows_with_taps]
        filled = torch.from_numpy(rows_with_taps).to(device)
    sums = _sum_of_taps(columns[by_row], offsets.astype(np.int32), weights[by_row], device)
    return sums._replace(rows=filled)


def _kron_of_equal_rows(y: Taps, x: Taps, device: torch.device) -> SparseSum:
    """:func:`_kron` where no row has more taps than another: nothing is sorted.

    As where a table shrinks: 32 in place of 47 us, of 240 for a new grid of a 64 x 64 table.
    """
    of_y, of_x = y.of_each_row, x.of_each_row
    columns = y.columns.reshape(-1, 1, of_y, 1) * x.shape[1] + x.columns.reshape(-1, 1, of_x)
    weights = y.weights.reshape(-1, 1, of_y, 1) * x.weights.reshape(-1, 1, of_x)
    offsets = np.arange(0, columns.size, of_y * of_x, dtype=np.int32)
    return _sum_of_taps(columns, offsets, weights, device)  # of (h, w, of_y, of_x)


def definition(table: Tensor, sizes: Iterable[Size], spec: ResizeSpec) -> Embeddings:
    """The embeddings of each size from a float64 table (H0, W0, C), by dense float64 matrices.

    All else in this package computes this formula faster. It runs where PyTorch has to derive it
    (second derivatives, ``is_grads_batched``). Neither autocast nor TF32 touches float64.
    """
    import einx  # here, because it takes seconds

    h0, w0, _ = table.shape
    table_size = h0, w0
    for size in sizes:
        with kept.unseen():
            rows, columns = (
                taps.dense().to(table.device, non_blocking=True)
                for taps in grid_taps(size, table_size, spec, torch.float32)
            )  # (h, H0), (w, W0)
        yield size, einx.dot("h h0, h0 w0 c, w w0 -> (h w) c", rows, table, columns)
