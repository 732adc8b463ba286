"""Views on the tokens of a batch: add embeddings to them, sum gradients over them, and hand both to autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .grids import GridGroup

# At most this many tensors are added one after the other; longer sums are split, so that float32 rounds less.
IN_A_ROW = 16


@dataclass
class Tokens:
    """The tokens of each sample, as views.

    Args:
        in_grid: for each sample, its tokens that lie in the grid, (tokens, C).
        padding: for each sample, the tokens after them, (padding, C).
        batch: all of them, (B, N, C), where they lie one after the other in memory.
    """

    in_grid: Sequence[Tensor]
    padding: Sequence[Tensor]
    batch: Tensor | None = None

    @classmethod
    def split(cls, x: Tensor, counts: list[tuple[int, int]]) -> Tokens:
        """Views on ``x``. ``counts``: of each sample, how many of its tokens lie in the grid, and how many after."""
        if x.ndim == 3 and not x.is_contiguous():
            return cls([s[:n] for s, (n, _) in zip(x, counts)], [s[n:] for s, (n, _) in zip(x, counts)])
        # One split. To slice sample by sample costs as much as the embeddings (64 samples of a 16 x 16 table).
        parts = (x.flatten(0, 1) if x.ndim == 3 else x).split_with_sizes(list(chain.from_iterable(counts)))
        return cls(parts[::2], parts[1::2], x if x.ndim == 3 else None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tokens."""
        return self.in_grid[0].dtype

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        return self.in_grid[0].device

    def add(self, group: GridGroup, embeddings: Tensor) -> None:
        """Add a group's embeddings (h*w, C) to the tokens of its samples, in place."""
        if group.embeds_padding:
            for sample in group.samples:
                self.padding[sample].add_(embeddings[:1])
        if group.cell_of_token is not None:
            embeddings = embeddings[group.cell_of_token.to(embeddings.device, non_blocking=True)]
        elif group.tokens < len(embeddings):
            embeddings = embeddings[: group.tokens]
        if self.batch is not None and 1 < len(group.samples) == len(self.batch):
            self.batch[:, : group.tokens].add_(embeddings)
            return
        for sample in group.samples:
            self.in_grid[sample].add_(embeddings)

    def sum(self, group: GridGroup, dtype: torch.dtype, copy: bool = False) -> Tensor:
        """The transpose of ``add``: the sum (h*w, C) over a group's samples, in ``dtype``.

        Of a single sample it may be a view of the tokens, unless a ``copy`` is wanted.
        """
        total = self._sum(group.samples, dtype, copy or group.embeds_padding).contiguous()
        if group.cell_of_token is not None:
            summed = total.new_zeros(group.h * group.w, total.shape[-1])
            total = summed.index_add_(0, group.cell_of_token.to(total.device, non_blocking=True), total)
        elif group.tokens < group.h * group.w:
            total = torch.nn.functional.pad(total, (0, 0, 0, group.h * group.w - group.tokens))
        if group.embeds_padding:
            total[0] += torch.stack([self.padding[sample].sum(0, dtype=dtype) for sample in group.samples]).sum(0)
        return total

    def _sum(self, samples: list[int], dtype: torch.dtype, copy: bool = False) -> Tensor:
        """The sum of some samples' tokens in the grid, of which all have as many, in ``dtype``."""
        if len(samples) > IN_A_ROW:
            half = len(samples) // 2
            return self._sum(samples[:half], dtype).add_(self._sum(samples[half:], dtype))
        first, *others = (self.in_grid[sample] for sample in samples)
        if len(others) > 1 and self.batch is not None and first.is_cpu and first.dtype == dtype == torch.float32:
            # All in one pass: each number is read once, only the sum is written. Its row n adds token n of each sample.
            cells = torch.arange(len(first), device="cpu")
            rows = cells[:, None] + torch.tensor(samples, device="cpu") * self.batch.shape[1]
            return torch.embedding_bag(self.batch.flatten(0, 1), rows.flatten(), cells * len(samples))[0]
        total = torch.add(first.to(dtype), others[0]) if others else first.to(dtype, copy=copy)
        for other in others[1:]:
            total += other
        return total


class PairwiseSum:
    """The sum of tensors of one shape, as they come. Each must own its memory, which is written to; few are alive."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []  # of 2^k tensors, of fewer and fewer
        self._count = 0

    def add(self, part: Tensor) -> None:
        """Add one more; it is written to."""
        self._count += 1
        pairs = self._count
        while pairs % 2 == 0:
            part, pairs = self._sums.pop().add_(part), pairs // 2
        self._sums.append(part)

    def total(self) -> Tensor:
        """The sum of all that came, of one at least."""
        total = self._sums.pop()
        while self._sums:
            total = self._sums.pop().add_(total)
        return total


class AddedInPlace(torch.autograd.Function):
    """Tells autograd that something linear in the tables is added into ``x``, in place.

    The gradient of ``x`` passes through untouched.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradients: Callable[[Tensor], Iterable[Tensor]], *tables: Tensor) -> Tensor:
        """``gradients(g)`` gives the gradients of ``tables``, in any dtype."""
        ctx.gradients, ctx.tables = gradients, [(table.shape, table.dtype) for table in tables]
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradient of ``x`` itself, and those of the tables in the tables' shapes and dtypes."""
        (g,) = grads
        found = ctx.gradients(g) if any(ctx.needs_input_grad[2:]) else [None] * len(ctx.tables)
        return g, None, *(grad if grad is None else grad.reshape(s).to(d) for grad, (s, d) in zip(found, ctx.tables))
