"""The tokens of a batch: add embeddings to them, sum gradients over them, and hand both to
autograd."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .grids import GridGroup, TokenCounts

# At most this many tensors are added one after the other; longer sums are split, so that float32
# rounds less.
MAX_SEQUENTIAL = 16


class Tokens:
    """The tokens ``x`` of a batch, (B, N, C) or packed (T, C), to which embeddings are added, and
    their gradients.

    ``counts``: of each sample, how many of its tokens lie in the grid, and how many come after.
    """

    def __init__(self, x: Tensor, counts: TokenCounts) -> None:
        self.x, self.counts, self.dtype, self.device = x, counts, x.dtype, x.device
        self.batch = x if x.ndim == 3 and x.is_contiguous() else None

    @cached_property
    def views(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Of each sample a view of its tokens that lie in the grid, (tokens, C), and one of those
        after them."""
        if self.x.ndim == 3 and self.batch is None:
            each = list(zip(self.x, self.counts))
            return [tokens[:n] for tokens, (n, _) in each], [tokens[n:] for tokens, (n, _) in each]
        # At once: to slice sample by sample costs as much as the embeddings (64 samples of a 16 x
        # 16 table).
        if self.batch is not None and not any(after for _, after in self.counts):
            return self.batch.unbind(), ()  # there is no padding
        packed = self.x if self.batch is None else self.x.flatten(0, 1)
        parts = packed.split_with_sizes(list(chain.from_iterable(self.counts)))
        return parts[::2], parts[1::2]

    def add(self, group: GridGroup, embeddings: Tensor) -> None:
        """Add a group's embeddings (h*w, C) to the tokens of its samples, in place."""
        alike = not group.cell_index or len(self.counts) == 1
        if self.batch is not None and alike and 0 < len(group.samples) == len(self.batch):
            count, padding = self.counts[0]
            if not (padding and group.embeds_padding):
                if group.cell_index:
                    embeddings = embeddings.index_select(
                        0, group.cell_index[0].to(self.device, non_blocking=True)
                    )
                (self.batch.narrow(1, 0, count) if padding else self.batch).add_(embeddings)
                return
        in_grid, after = self.views
        if group.embeds_padding and after:
            for sample in group.samples:
                after[sample].add_(embeddings[:1])
        taken: dict[int, Tensor] = {}  # frames of a video share their order
        for sample in group.samples:
            tokens, cell = in_grid[sample], group.cell_index.get(sample)
            if cell is None:
                n = len(tokens)
                tokens.add_(embeddings if len(embeddings) == n else embeddings[:n])
                continue
            if id(cell) not in taken:
                taken = {
                    id(cell): embeddings.index_select(
                        0, cell.to(embeddings.device, non_blocking=True)
                    )
                }
            tokens.add_(taken[id(cell)])

    def sum(self, group: GridGroup, dtype: torch.dtype) -> Tensor:
        """The transpose of ``add``: the sum (h*w, C) over a group's samples, in ``dtype``.

        Of a single sample it may be a view of the tokens.
        """
        orders: dict[int, list[int]] = {}  # samples by the order of their tokens, which most share
        for sample in group.samples:
            orders.setdefault(id(group.cell_index.get(sample)), []).append(sample)
        total = PairwiseSum()
        for samples in orders.values():
            summed, cell = self._sum(samples, dtype), group.cell_index.get(samples[0])
            missing = group.h * group.w - len(summed)
            if cell is None:
                if len(orders) == 1 and not missing and not group.embeds_padding:
                    return summed.contiguous()
                total.add(F.pad(summed, (0, 0, 0, missing)))  # a copy, which may be written to
            else:
                total.accumulate(summed, cell.to(self.device, non_blocking=True), group.h * group.w)
        out = total.total()
        if group.embeds_padding and self.views[1]:
            out[0] += torch.stack(
                [self.views[1][sample].sum(0, dtype=dtype) for sample in group.samples]
            ).sum(0)
        return out

    def _sum(self, samples: list[int], dtype: torch.dtype) -> Tensor:
        """The sum of some samples' tokens in the grid, of which all have as many, in ``dtype``."""
        if len(samples) > MAX_SEQUENTIAL:
            half = len(samples) // 2
            return self._sum(samples[:half], dtype).add_(self._sum(samples[half:], dtype))
        first, *others = (self.views[0][sample] for sample in samples)
        if (
            len(others) > 1
            and self.batch is not None
            and first.is_cpu
            and first.dtype == dtype == torch.float32
        ):
            # All in one pass: each number is read once, only the sum is written. Its row n adds
            # token n of each sample.
            cells = torch.arange(len(first), device="cpu")
            rows = cells[:, None] + torch.tensor(samples, device="cpu") * self.batch.shape[1]
            return torch.embedding_bag(
                self.batch.flatten(0, 1), rows.flatten(), cells * len(samples)
            )[0]
        total = torch.add(first.to(dtype), others[0]) if others else first.to(dtype)
        for other in others[1:]:
            total += other
        return total


def assemble(
    embeddings: Iterable[tuple[GridGroup, Tensor]],
    counts: TokenCounts,
    take: Callable[[Tensor, Tensor], Tensor] = Tensor.__getitem__,
) -> Tensor:
    """What ``Tokens.add`` adds to each token, (T, C), in a new tensor: -0.0 where it adds
    nothing."""
    parts = {}
    for group, grid in embeddings:
        padding = grid[:1] if group.embeds_padding else torch.full_like(grid[:1], -0.0)
        for sample in group.samples:
            (in_grid, after), cell = counts[sample], group.cell_index.get(sample)
            added = (
                grid[:in_grid]
                if cell is None
                else take(grid, cell.to(grid.device, non_blocking=True))
            )
            parts[sample] = torch.cat((added, padding.expand(after, -1)))
    return torch.cat([parts[sample] for sample in range(len(counts))])


class PairwiseSum:
    """The sum of tensors of one shape, as they come. Each must own its memory, which is written to;
    few are alive."""

    def __init__(self) -> None:
        self._sums: list[
            Tensor
        ] = []  # of 2^k parts each, k smaller and smaller; the newest of one part
        self._count = self._accumulated = 0

    def add(self, part: Tensor) -> None:
        """Add one more; it is written to."""
        pairs = self._count
        while pairs and pairs % 2 == 0:
            newest, pairs = self._sums.pop(), pairs // 2
            self._sums[-1].add_(newest)
        self._sums.append(part)
        self._count += 1

    def accumulate(self, part: Tensor, rows: Tensor | None, total_rows: int) -> None:
        """Add one more to the newest part, ``MAX_SEQUENTIAL`` in turn; the first of them is written
        to.

        ``rows``: to which of ``total_rows`` rows those of ``part`` are added; None: it has them
        all, in order.
        """
        if self._accumulated % MAX_SEQUENTIAL == 0:
            whole = (
                part
                if rows is None
                else part.new_zeros(total_rows, part.shape[1]).index_add_(0, rows, part)
            )
            self.add(whole)
        elif rows is None:
            self._sums[-1].add_(part)
        else:
            self._sums[-1].index_add_(0, rows, part)
        self._accumulated += 1

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
    def forward(
        ctx: Any, x: Tensor, gradients: Callable[[Tensor], Iterable[Tensor]], *tables: Tensor
    ) -> Tensor:
        """``gradients(g)`` gives the gradients of ``tables``, in any dtype."""
        ctx.gradients, ctx.shapes = gradients, [table.shape for table in tables]
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradient of ``x`` itself, and those of the tables in the tables' shapes; autograd
        casts them."""
        (g,) = grads
        grads = ctx.gradients(g) if ctx.shapes else ()
        return g, None, *(grad.reshape(shape) for grad, shape in zip(grads, ctx.shapes))
