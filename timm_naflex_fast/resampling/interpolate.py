"""timm's own ``F.interpolate``, once per distinct grid, and one gather-add; finished tables kept while they hold.

Bit-identical to timm on CPU: the same call on the same tensor. What differs is the write: timm adds into slices of
``x``, and autograd then copies the whole gradient once per grid; one gather makes the backward linear in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import scattered
from .cache import cache
from .grids import Group, add_cells, grid_tokens
from .matrices import Resampling


def add_learned(x: Tensor, table: Tensor, groups: list[Group], how: Resampling) -> None:
    """Add the table ([1,] H0, W0, C), resized to each sample's grid, into ``x`` (B, N, C) in place."""

    def build(size: tuple[int, int]) -> Tensor:
        h, w = size
        if size == tuple(table.shape[-3:-1]):
            return table.reshape(h * w, -1).to(x.dtype)
        resized = F.interpolate(
            table.reshape(1, *table.shape[-3:]).permute(0, 3, 1, 2).float(),
            size=how.lengths(h, w),
            mode=how.mode,
            align_corners=how.align_corners,
            antialias=how.antialias,
        )
        return resized[0, :, :h, :w].flatten(1).t().to(x.dtype)

    _gather_add(x, (table,), scattered.add_learned(x, table, groups, how), how, build)


def add_factorized(
    x: Tensor, table_y: Tensor, table_x: Tensor, groups: list[Group], ar_preserving: bool = False
) -> None:
    """Add ``y + x`` of the tables ([1,] H0, C) and ([1,] W0, C), resized by 1-D ``linear``, into ``x`` in place."""
    how = Resampling(mode="linear", ar_preserving=ar_preserving)

    def line(table: Tensor, n: int) -> Tensor:
        table = table.reshape(1, *table.shape[-2:])
        if n != table.shape[1]:
            table = F.interpolate(table.permute(0, 2, 1).float(), size=n, mode="linear").permute(0, 2, 1)
        return table[0].to(x.dtype)

    def build(size: tuple[int, int]) -> Tensor:
        rows, cols = how.lengths(*size)
        return (line(table_y, rows)[: size[0], None] + line(table_x, cols)[None, : size[1]]).flatten(0, 1)

    groups = scattered.add_factorized(x, table_y, table_x, groups, ar_preserving)
    _gather_add(x, (table_y, table_x), groups, how, build)


def _gather_add(
    x: Tensor,
    sources: tuple[Tensor, ...],
    groups: list[Group],
    how: Resampling,
    build: Callable[[tuple[int, int]], Tensor],
) -> None:
    if not groups:
        return
    sizes = list(dict.fromkeys((group.h, group.w) for group in groups))
    if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
        tables = [build(size) for size in sizes]
    else:

        def finished(sizes: list[tuple[int, int]]) -> Iterable[Tensor]:
            if not cache.settled(sources):
                return map(build, sizes)
            return cache.fetch(sources, sizes, ("interpolate_cached", how, x.dtype), build)

        if not (torch.is_grad_enabled() and x.requires_grad):  # no backward, so slices cost nothing and need no copy
            views = grid_tokens(x, groups)
            for group, cells in zip(groups, finished([(group.h, group.w) for group in groups])):
                add_cells(views, group, cells)
            return
        tables = list(finished(sizes))
    starts, end = {}, 0
    for size, cells in zip(sizes, tables):
        starts[size], end = end, end + len(cells)
    # Tokens outside their grid read a row of -0.0, the one value that leaves every float as it is, 0.0 and -0.0 too.
    flat = torch.cat([*tables, x.new_full((1, x.shape[-1]), -0.0)])
    index = torch.full(x.shape[:2], end, dtype=torch.int64, device="cpu")
    reordered = []
    for group in groups:
        start = starts[group.h, group.w]
        if group.cells is None and group.samples:
            index[group.samples, : group.tokens] = torch.arange(start, start + group.tokens, device="cpu")
        elif group.cells is not None:
            reordered.append((group.samples[0], group.tokens, start + group.cells))
    index = index.to(x.device)
    for sample, tokens, rows in reordered:
        index[sample, :tokens] = rows
    x.add_(F.embedding(index, flat, padding_idx=end))
