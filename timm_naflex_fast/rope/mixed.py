"""Mixed rotary tables: learned frequencies for every block and head, so a table (B, heads, N, 2D) per block.

A block's sines and cosines are computed once per cell of the batch's grids, and each token takes its cell's line. The
backward first sums the gradients of a cell's tokens, then goes through the table of a few hundred cells to the
frequencies. Blocks share no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .grids import Grids, cells, padding
from .settings import Rope
from .tables import layout, sum_of_lines

CHUNK_BYTES = 2**25


class MixedTables:
    """The tables (B, heads, N, 2D) of ``depth`` blocks in turn; every loop over them computes them again."""

    def __init__(self, depth: int, make: Callable[[int], Tensor]) -> None:
        self.depth, self.make = depth, make

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.make, range(self.depth))


def by_block(rope: Rope, coord: Tensor, dtype: torch.dtype, grids: Grids) -> Callable[[int], Tensor]:
    """Prepare the tables of the tokens (B, N, 2): a function from a block's number to (B, heads, N, 2D)."""
    positions, cell = cells(rope, coord, grids)
    # A table holds one line per head and cell, then a line of zeros for padding.
    heads, count = rope.frequencies.shape[2], len(positions)
    index = cell[:, None] + torch.arange(heads, dtype=torch.int32, device=cell.device)[:, None] * count
    index.masked_fill_(padding(coord)[:, None], heads * count)

    def table(block: int) -> Tensor:
        lines = layout(rope.angles(positions, block), rope.half)  # (heads, cells, 2D)
        return _Spread.apply(lines.flatten(0, 1), index, dtype)

    return table


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
        # Tokens in another dtype are copied into a wider one, a few samples at a time.
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
