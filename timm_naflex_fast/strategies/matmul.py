"""Exact separable resampling as matrix products: ``x[b] += A_h . P . A_w^T``, and its adjoint.

Forward: the table is contracted with A_w once per distinct width, then with A_h once per grid. Backward: the
gradient of ``x`` passes through untouched; that of the table, ``sum_b A_h^T . g_b . A_w``, first sums the samples
that share a grid, then the grids that share a width. Work is linear in tokens and nothing the size of ``x`` is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..grids import Group, add_cells
from ..precision import no_autocast, once_differentiable, product_dtype
from ..resize import Resampling, axis_matrices, cell_taps, narrow_band, resize_matrix


def add_learned(
    x: Tensor, table: Tensor, groups: list[Group], how: Resampling, *, dtype: torch.dtype = torch.float32
) -> None:
    """Add the table ([1,] H0, W0, C), resampled to each sample's grid in ``dtype``, into ``x`` (B, N, C) in place."""
    if groups:
        _AddLearned.apply(x, table, groups, how, dtype)


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
        with no_autocast(x.device):
            for group, cells in _resample_groups(table.reshape(table.shape[-3:]), groups, how, dtype):
                add_cells(x, group, cells.to(x.dtype))
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
            with torch.no_grad(), no_autocast(g.device):
                grad_table = _learned_grad(g, ctx.table_shape[-3:], ctx.groups, ctx.how, ctx.dtype)
            grad_table = once_differentiable(grad_table.view(ctx.table_shape).to(ctx.table_dtype), g)
        return g, grad_table, None, None, None


class _AddFactorized(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, table_y: Tensor, table_x: Tensor, groups: list[Group], how: Resampling, dtype: torch.dtype
    ) -> Tensor:
        with no_autocast(x.device):
            sides: dict[tuple[str, int], Tensor] = {}
            for group in groups:
                rows, cols = how.lengths(group.h, group.w)
                for key, table in ((("y", rows), table_y), (("x", cols), table_x)):
                    if key not in sides:
                        sides[key] = _resample_line(table.reshape(table.shape[-2:]), key[1], dtype).to(x.dtype)
                pe = sides["y", rows][: group.h, None] + sides["x", cols][None, : group.w]
                add_cells(x, group, pe.flatten(0, 1))
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


def _resample_groups(
    own: Tensor, groups: list[Group], how: Resampling, dtype: torch.dtype
) -> Iterator[tuple[Group, Tensor]]:
    """Each group with its resampled table, flat: (h*w, C), in ``dtype``; as it is where timm adds it as it is."""
    rows, cols, channels = own.shape
    table = own.to(dtype)
    flat, wide = table.reshape(rows * cols, channels), product_dtype(dtype)
    for w, same_width in _by_width(groups, how):
        across = None  # the table contracted with A_w, (H0, w*C), shared by the grids of this width
        for group in same_width:
            matrices = axis_matrices(group.h, group.w, (rows, cols), how, dtype, table.device)
            if matrices is None:
                yield group, own.reshape(rows * cols, channels)
            elif narrow_band(group.h, group.w, (rows, cols), how):
                index, weights = cell_taps(group.h, group.w, (rows, cols), how, dtype, table.device)
                yield group, F.embedding_bag(index, flat, per_sample_weights=weights, mode="sum")
            else:
                a_h, a_w = (a.to(wide) for a in matrices)
                if across is None:
                    across = torch.matmul(a_w, table.to(wide)).view(rows, w * channels)
                yield group, (a_h @ across).view(group.h * w, channels).to(dtype)


def _learned_grad(
    g: Tensor, table_shape: torch.Size, groups: list[Group], how: Resampling, dtype: torch.dtype
) -> Tensor:
    rows, cols, channels = table_shape
    total = torch.promote_types(dtype, g.dtype)  # a float64 gradient of a table added as it is stays float64
    wide = product_dtype(total)
    grad = torch.zeros(rows, cols, channels, dtype=wide, device=g.device)
    flat = grad.view(rows * cols, channels)
    for w, same_width in _by_width(groups, how):
        across = a_w = None
        for group in same_width:
            cells = _sum_cells(g, group, total)
            matrices = axis_matrices(group.h, group.w, (rows, cols), how, dtype, g.device)
            if matrices is None:
                flat += cells
            elif narrow_band(group.h, group.w, (rows, cols), how):
                index, weights = cell_taps(group.h, group.w, (rows, cols), how, dtype, g.device)
                for cell, weight in zip(index.unbind(1), weights.unbind(1)):
                    flat.index_add_(0, cell, (cells * weight[:, None]).to(wide))
            else:
                a_h, a_w = (a.to(wide) for a in matrices)
                part = a_h.t() @ cells.view(group.h, w * channels).to(wide)
                across = part if across is None else across.add_(part)
        if across is not None and a_w is not None:
            grad += torch.matmul(a_w.t(), across.view(rows, w, channels))
    return grad


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
    for group in groups:
        cells = _sum_cells(g, group, work).view(group.h, group.w, channels)
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


def _by_width(groups: list[Group], how: Resampling) -> Iterator[tuple[int, Iterator[Group]]]:
    """The groups that share a resized width and its crop w, together."""

    def width(group: Group) -> tuple[int, int]:
        return how.lengths(group.h, group.w)[1], group.w

    for (_, w), same_width in groupby(sorted(groups, key=width), key=width):
        yield w, same_width


def _sum_cells(g: Tensor, group: Group, dtype: torch.dtype) -> Tensor:
    """The gradient (h*w, C) of a group's resampled table: its samples summed, in ``dtype``."""
    if len(group.samples) == len(g):
        total = g[:, : group.tokens].sum(0, dtype=dtype)
    else:
        total = g[group.samples[0], : group.tokens].to(dtype, copy=True)
        for sample in group.samples[1:]:
            total += g[sample, : group.tokens]
    if group.cells is None and group.tokens == group.h * group.w:
        return total.contiguous()
    cells = total.new_zeros(group.h * group.w, g.shape[-1])
    if group.cells is None:
        cells[: group.tokens] = total
        return cells
    return cells.index_add_(0, group.cells, total)
