"""Exact separable resampling: ``x[b] += A_h . P . A_w^T``, and its adjoint.

Only the non-zeros of the matrices are read, as weighted sums of rows (bags.py). Forward: the table is summed along y
once per distinct height, then along x once per grid, or along both at once. Backward: the gradient of ``x`` passes
through untouched; that of the table, ``sum_b A_h^T . g_b . A_w``, first sums the samples that share a grid, then the
grids that share a height. Work is linear in tokens and nothing the size of ``x`` is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import scattered
from .bags import AtOnce, AxisByAxis, steps
from .cache import cache
from .grids import Group, add_cells, grid_tokens
from .matrices import Resampling, resize_matrix
from .precision import no_autocast, once_differentiable, product_dtype


def add_learned(
    x: Tensor, table: Tensor, groups: list[Group], how: Resampling, *, dtype: torch.dtype = torch.float32
) -> None:
    """Add the table ([1,] H0, W0, C), resampled to each sample's grid in ``dtype``, into ``x`` (B, N, C) in place.

    A table that is not being trained is resampled once per grid while it stays the same.
    """
    groups = scattered.add_learned(x, table, groups, how)
    if not groups:
        return
    if torch.is_grad_enabled() and table.requires_grad:
        cache.forget((table,))
        _AddLearned.apply(x, table, groups, how, dtype)
    elif torch.is_grad_enabled() and x.requires_grad:
        _AddFrozen.apply(x, table, groups, how, dtype)
    else:
        _add_frozen(x, table, groups, how, dtype)


def add_factorized(
    x: Tensor,
    table_y: Tensor,
    table_x: Tensor,
    groups: list[Group],
    ar_preserving: bool = False,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Add ``y + x`` of the tables ([1,] H0, C) and ([1,] W0, C), resized by 1-D ``linear``, into ``x`` in place."""
    groups = scattered.add_factorized(x, table_y, table_x, groups, ar_preserving)
    if groups:
        _AddFactorized.apply(x, table_y, table_x, groups, Resampling(ar_preserving=ar_preserving), dtype)


def resample(table: Tensor, size: tuple[int, int], how: Resampling, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The table (H0, W0, C) resampled to (h, w, C), differentiable in the table."""
    h, w = size
    cells = torch.zeros(1, h * w, table.shape[-1], dtype=dtype, device=table.device)
    add_learned(cells, table, [Group(h, w, [0], h * w)], how, dtype=dtype)
    return cells.view(h, w, -1)


class _AddLearned(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, table: Tensor, groups: list[Group], how: Resampling, dtype: torch.dtype) -> Tensor:
        _add_resampled(x, table, groups, how, dtype)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, table, ctx.groups, ctx.how, ctx.dtype = inputs
        ctx.table_shape, ctx.table_dtype = table.shape, table.dtype
        ctx.mark_dirty(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        grad_table = None
        if ctx.needs_input_grad[1]:
            with torch.no_grad():
                grad_table = _learned_grad(g, ctx.table_shape[-3:], ctx.groups, ctx.how, ctx.dtype)
            grad_table = once_differentiable(grad_table.view(ctx.table_shape).to(ctx.table_dtype), g)
        return g, grad_table, None, None, None


class _AddFrozen(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, table: Tensor, groups: list[Group], how: Resampling, dtype: torch.dtype) -> Tensor:
        _add_frozen(x, table, groups, how, dtype)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_dirty(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None, None, None, None


class _AddFactorized(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, table_y: Tensor, table_x: Tensor, groups: list[Group], how: Resampling, dtype: torch.dtype
    ) -> Tensor:
        with no_autocast(x.device):
            sides: dict[tuple[str, int], Tensor] = {}
            tokens = grid_tokens(x, groups)
            for group in groups:
                rows, cols = how.lengths(group.h, group.w)
                for key, table in ((("y", rows), table_y), (("x", cols), table_x)):
                    if key not in sides:
                        sides[key] = _resample_line(table.reshape(table.shape[-2:]), key[1], dtype).to(x.dtype)
                pe = sides["y", rows][: group.h, None] + sides["x", cols][None, : group.w]
                add_cells(tokens, group, pe.flatten(0, 1))
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, table_y, table_x, ctx.groups, ctx.how, ctx.dtype = inputs
        ctx.tables = [(table.shape, table.dtype) for table in (table_y, table_x)]
        ctx.mark_dirty(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        if not any(ctx.needs_input_grad[1:3]):
            return g, None, None, None, None, None
        with torch.no_grad(), no_autocast(g.device):
            lengths = (ctx.tables[0][0][-2], ctx.tables[1][0][-2])
            lines = _factorized_grad(g, lengths, ctx.groups, ctx.how, ctx.dtype)
        grad_y, grad_x = (once_differentiable(line.view(s).to(d), g) for line, (s, d) in zip(lines, ctx.tables))
        return g, grad_y, grad_x, None, None, None


@lru_cache(maxsize=1)
def _keep_heap() -> None:
    """Make glibc reuse temporaries of a few MB: freeing one block of 31 MiB raises its thresholds to that size.

    By default it returns them to the kernel at once, and the next call faults them in again page by page, which took
    longer than the sums (27 ms instead of 11, 64 samples of a 32 x 32 table). No memory is touched here.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")


def _add_resampled(x: Tensor, table: Tensor, groups: list[Group], how: Resampling, dtype: torch.dtype) -> None:
    _keep_heap()
    tokens = grid_tokens(x, groups)
    for group, cells in _resample_groups(table, groups, how, dtype):
        add_cells(tokens, group, cells.to(x.dtype))


def _add_frozen(x: Tensor, table: Tensor, groups: list[Group], how: Resampling, dtype: torch.dtype) -> None:
    # To compare a table costs two reads of each cell; to resample one, about eight of each grid cell.
    worth_comparing = table.shape[-3] * table.shape[-2] <= 4 * sum(group.h * group.w for group in groups)
    if not (worth_comparing and cache.settled((table,))):
        return _add_resampled(x, table, groups, how, dtype)

    def build(size: tuple[int, int]) -> Tensor:
        ((_, cells),) = _resample_groups(table, [Group(*size, [], size[0] * size[1])], how, dtype)
        return cells.to(x.dtype)

    tokens, sizes = grid_tokens(x, groups), [(group.h, group.w) for group in groups]
    for group, cells in zip(groups, cache.fetch((table,), sizes, ("matmul", how, dtype, x.dtype), build)):
        add_cells(tokens, group, cells)


def _resample_groups(
    table: Tensor, groups: list[Group], how: Resampling, dtype: torch.dtype
) -> Iterator[tuple[Group, Tensor]]:
    """Each group with its resampled table, flat: (h*w, C), in ``dtype``; as it is where timm adds it as it is."""
    rows, cols, channels = table.shape[-3:]
    own = table.detach().reshape(rows * cols, channels)
    lines = own.to(dtype).view(rows, cols * channels)
    for h, same_height in _by_height(groups, how):
        strip = None  # the table contracted with A_h, (h*W0, C), shared by the grids of this height
        for group in same_height:
            way = steps(h, group.w, (rows, cols), how, False, dtype, table.device)
            if way is None:
                yield group, own
            elif isinstance(way, AtOnce):
                yield group, way.cells.of(lines.view(-1, channels))
            else:
                if strip is None:
                    strip = way.y.of(lines).view(-1, channels)
                yield group, way.x.of(strip)


def _learned_grad(
    g: Tensor, table_shape: torch.Size, groups: list[Group], how: Resampling, dtype: torch.dtype
) -> Tensor:
    rows, cols, channels = table_shape
    work = torch.promote_types(dtype, g.dtype)  # a float64 gradient of a table added as it is stays float64
    grad = torch.zeros(rows, cols * channels, dtype=work, device=g.device)
    flat, tokens = grad.view(-1, channels), grid_tokens(g, groups)
    for h, same_height in _by_height([group for group in groups if group.samples], how):
        strip = last = None
        for group in same_height:
            cells = _sum_cells(tokens, group, work)
            way = steps(h, group.w, (rows, cols), how, True, dtype, g.device)
            if way is None:
                flat += cells
            elif isinstance(way, AxisByAxis):
                part, last = way.x.of(cells), way.y
                strip = part if strip is None else strip.add_(part)
            elif way.touched is None:
                flat += way.cells.of(cells)
            else:
                flat.index_add_(0, way.touched, way.cells.of(cells))
        if strip is not None and last is not None:
            grad += last.of(strip.view(h, cols * channels))
    return grad.view(table_shape)


def _resample_line(table: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """The 1-D table (N0, C) resized to (n, C) in ``dtype``; as it is when n == N0."""
    if n == table.shape[0]:
        return table
    wide = product_dtype(dtype)
    matrix = resize_matrix(n, table.shape[0], "linear", False, False, dtype, table.device)
    return (matrix.to(wide) @ table.to(dtype).to(wide)).to(dtype)


def _factorized_grad(
    g: Tensor, lengths: tuple[int, int], groups: list[Group], how: Resampling, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients of the two tables: sums over a grid's other axis, gathered per resized length, then A^T."""
    channels, work = g.shape[-1], torch.promote_types(dtype, g.dtype)
    sides: dict[tuple[int, int], Tensor] = {}
    tokens = grid_tokens(g, groups)
    for group in (group for group in groups if group.samples):
        cells = _sum_cells(tokens, group, work).view(group.h, group.w, channels)
        for axis, (n, side) in enumerate(zip(how.lengths(group.h, group.w), (cells.sum(1), cells.sum(0)))):
            total = sides.setdefault((axis, n), torch.zeros(n, channels, dtype=work, device=g.device))
            total[: len(side)] += side
    wide = product_dtype(work)
    grads = tuple(torch.zeros(n0, channels, dtype=wide, device=g.device) for n0 in lengths)
    for (axis, n), total in sides.items():
        if n == lengths[axis]:
            grads[axis].add_(total)
        else:
            matrix = resize_matrix(n, lengths[axis], "linear", False, False, dtype, g.device)
            grads[axis].add_(matrix.to(wide).t() @ total.to(wide))
    return grads[0], grads[1]


def _by_height(groups: list[Group], how: Resampling) -> Iterator[tuple[int, list[Group]]]:
    """The groups that share a resized height and its crop h, together."""
    heights: dict[tuple[int, int], list[Group]] = {}
    for group in groups:
        heights.setdefault((how.lengths(group.h, group.w)[0], group.h), []).append(group)
    for (_, h), same_height in heights.items():
        yield h, same_height


def _sum_cells(tokens: Sequence[Tensor], group: Group, dtype: torch.dtype) -> Tensor:
    """The gradient (h*w, C) of a group's resampled table: that of its samples' ``tokens`` summed, in ``dtype``."""
    first, *rest = (tokens[sample] for sample in group.samples)
    total = torch.add(first.to(dtype), rest[0]) if rest else first.to(dtype)
    for other in rest[1:]:
        total += other
    if group.cells is None and group.tokens == group.h * group.w:
        return total.contiguous()
    cells = total.new_zeros(group.h * group.w, total.shape[-1])
    if group.cells is None:
        cells[: group.tokens] = total
        return cells
    return cells.index_add_(0, group.cells, total)
