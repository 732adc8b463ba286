"""Mixed rotary tables: learned frequencies for every block and head, so a table (B, heads, N, 2D) per block.

A block's angles are computed once per cell of the batch's grids and gathered by token. The gradient takes the same way
back: summed per cell, then through a table of a few hundred cells to the frequencies. Nothing of one block is kept
for another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .grids import Grids, cells
from .settings import Rope
from .tables import layout, sum_of_lines, token_positions

CHUNK_BYTES = 2**25


class MixedTables:
    """The tables (B, heads, N, 2D) of the blocks in turn, each made when it is asked for; a new loop starts anew."""

    def __init__(self, depth: int, make: Callable[[int], Tensor]) -> None:
        self.depth, self.make = depth, make
        self._next = 0

    def __iter__(self) -> MixedTables:
        self._next = 0
        return self

    def __next__(self) -> Tensor:
        if self._next == self.depth:
            raise StopIteration
        self._next += 1
        return self.make(self._next - 1)


def mixed_closed(
    rope: Rope, coord: Tensor, dtype: torch.dtype, grids: Grids | None = None, *, look: bool
) -> Callable[[int], Tensor]:
    """A block's number to its table for the tokens (B, N, 2), by the formula per token and plain operations alone.

    ``grids`` and ``look``: as in :func:`closed`.
    """
    positions, past = (value.unsqueeze(1) for value in token_positions(rope, coord, grids))
    full = look and not past.any()

    def make(block: int) -> Tensor:
        table = layout(rope.angles(positions, block), rope.half).to(dtype)
        return table if full else table.masked_fill_(past, 0.0)

    return make


def mixed_gathered(rope: Rope, grids: Grids, dtype: torch.dtype) -> Callable[[int], Tensor]:
    """A block's number to its table for the tokens of ``grids``, gathered from one line per head and cell."""
    positions, index = cells(rope, grids)
    heads, count = rope.frequencies.shape[2], len(positions)
    by_head = index[:, None] + torch.arange(heads, dtype=index.dtype, device=index.device)[:, None] * count
    by_head.masked_fill_(grids.past[:, None], heads * count)

    def make(block: int) -> Tensor:
        lines = layout(rope.angles(positions, block), rope.half)  # (heads, cells, 2D)
        return _Spread.apply(lines.flatten(0, 1), by_head, dtype)

    return make


class _Spread(torch.autograd.Function):
    """Lines of a table (R, C) to tokens (..., C) in ``dtype``; the index R gives zeros. Linear, as is its gradient."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows, ctx.dtype = len(table), table.dtype
        return sum_of_lines(F.pad(table, (0, 0, 0, 1)).to(dtype), index.unsqueeze(-1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return _Collect.apply(grads[0], index, ctx.rows, ctx.dtype), None, None


class _Collect(torch.autograd.Function):
    """The sum of the tokens (B, ..., C) that take each of ``rows`` lines, (rows, C), added up in ``dtype``."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, index: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(index)
        ctx.dtype = tokens.dtype
        # In one piece, unless that needs a wider copy, as a gradient in bfloat16 does.
        whole = tokens.numel() * (tokens.dtype != dtype) * 8
        samples = max(1, len(tokens) * CHUNK_BYTES // max(whole, CHUNK_BYTES))
        lines = tokens.new_zeros(rows + 1, tokens.shape[-1], dtype=dtype)
        for part, where in zip(tokens.split(samples), index.split(samples)):
            lines += torch.ops.aten.embedding_dense_backward(part.to(dtype), where, rows + 1, rows, False)
        return lines[:rows]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return _Spread.apply(grads[0], index, ctx.dtype), None, None, None
