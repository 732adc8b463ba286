"""The tokens of a batch: add embeddings to them, sum gradients over them, and tell autograd."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..resampling.block_sum import BlockSum
from ..resampling.spec import Size
from .plan import Plan


@dataclass
class Tokens:
    """The tokens ``x`` of a batch, (B, N, C) or packed (T, C), or their gradients."""

    x: Tensor
    plan: Plan
    _parts: Sequence[Tensor] | None = None

    @property
    def parts(self) -> Sequence[Tensor]:
        """:meth:`_split`, once.

        Not by ``cached_property``: before Python 3.12 all objects share its lock, and a process that
        is forked while a thread holds it waits for ever.
        """
        if self._parts is None:
            self._parts = self._split()
        return self._parts

    def _split(self) -> Sequence[Tensor]:
        """Of each sample two views, (tokens, C): its tokens in the grid, and those after them.

        Of a contiguous batch all at once: to slice it sample by sample costs more.
        """
        counts = self.plan.counts
        if self.x.ndim == 3 and not self.x.is_contiguous():
            parts: list[Tensor] = []
            for sample, count in zip(self.x, counts):
                parts += sample.split_with_sizes(count)
            return parts
        return self.x.flatten(0, -2).split_with_sizes(list(chain.from_iterable(counts)))

    def in_grid(self, sample: int) -> Tensor:
        """The tokens of a sample that lie in its grid, (tokens, C)."""
        return self.parts[2 * sample]

    def after_grid(self, sample: int) -> Tensor:
        """The tokens of a sample that come after its grid: padding."""
        return self.parts[2 * sample + 1]

    def whole_batch(self, size: Size) -> Tensor | None:
        """The tokens in the grid, (B, tokens, C), if one operation serves all samples.

        Then they share the grid, and the order of their tokens: one image may have any. None where
        they differ, or get embeddings at padding too.
        """
        batch = len(self.plan.counts)
        if batch == 0 or self.x.ndim != 3 or len(self.plan.samples[size]) != batch:
            return None
        if self.plan.cell_index and batch > 1:
            return None
        count, after = self.plan.counts[0]
        if not after:
            return self.x
        return None if self.plan.embeds_padding else self.x[:, :count]

    def add(self, size: Size, embeddings: Tensor) -> None:
        """Add a grid's embeddings (h*w, C) to the tokens of its samples, in place."""
        embeddings = embeddings.to(self.x.dtype)
        # All images of one size, or one image: one addition.
        whole = self.whole_batch(size)
        if whole is not None:
            whole.add_(self._rows_of(0, embeddings))
            return

        # Otherwise sample by sample. These are views of x, so each addition writes into x itself.
        rows = cell_of_rows = None
        for sample in self.plan.samples[size]:
            cell = self.plan.cell_index.get(sample)
            if rows is None or cell is not cell_of_rows:  # samples may share it
                rows = self._rows_of(sample, embeddings)
                cell_of_rows = cell
            self.in_grid(sample).add_(rows)
            if self.plan.embeds_padding:
                self.after_grid(sample).add_(embeddings[:1])

    def _rows_of(self, sample: int, embeddings: Tensor) -> Tensor:
        """The embeddings of a sample's tokens: those of its cells, or of the first cells."""
        cell = self.plan.cell_index.get(sample)
        if cell is not None:
            return embeddings.index_select(0, cell)
        count, _ = self.plan.counts[sample]
        return embeddings[:count]

    def sum_over_samples(self, size: Size, dtype: torch.dtype) -> Tensor:
        """The transpose of ``add``: the sum (h*w, C) over a grid's samples, in ``dtype``.

        It may be a view of the tokens.
        """
        samples = self.plan.samples[size]
        cells = size[0] * size[1]
        count, _ = self.plan.counts[samples[0]]

        # If all samples are complete and in order, as most are, their tokens are the cells.
        if count == cells and not (self.plan.cell_index or self.plan.embeds_padding):
            if len(samples) == 1:
                return self.in_grid(samples[0]).to(dtype).contiguous()
            whole = self.whole_batch(size)
            if whole is not None:
                return whole.sum(0, dtype=dtype)

        # Otherwise sample by sample, each token into the row of its cell.
        total = BlockSum(cells, dtype)
        for sample in samples:
            total.add(self.in_grid(sample), self.plan.cell_index.get(sample))
        summed = total.total()
        if self.plan.embeds_padding:
            padding = [self.after_grid(sample).sum(0, dtype=dtype) for sample in samples]
            summed[0] += torch.stack(padding).sum(0)
        return summed


def assemble(plan: Plan, embeddings: Iterable[tuple[Size, Tensor]]) -> Tensor:
    """What ``Tokens.add`` adds to each token, (T, C), in a new tensor: -0.0 where it adds nothing.

    PyTorch can derive it any number of times, and batches of its gradients: those of an embedding
    can be batched, those of an index cannot.
    """
    parts = {}
    for size, of_grid in embeddings:
        padding = of_grid[:1] if plan.embeds_padding else torch.full_like(of_grid[:1], -0.0)
        for sample in plan.samples[size]:
            in_grid, after = plan.counts[sample]
            cell = plan.cell_index.get(sample)
            added = of_grid[:in_grid] if cell is None else F.embedding(cell, of_grid)
            parts[sample] = torch.cat((added, padding.expand(after, -1)))
    return torch.cat([parts[sample] for sample in range(len(plan.counts))])


def check_no_shared_elements(x: Tensor) -> None:
    """Raise RuntimeError, as PyTorch's own ``add_`` does, if elements of ``x`` share memory.

    Our sums write into views, where PyTorch cannot see it.
    """
    if x.is_contiguous():
        return
    for stride, size in zip(x.stride(), x.shape):
        if stride == 0 and size > 1:
            raise RuntimeError(
                "x cannot be added to in place: several of its elements are one and the same "
                "memory location (as after expand()); clone() it before"
            )


class AddedInPlace(torch.autograd.Function):
    """Tells autograd that something linear in a table is added into ``x``, in place.

    ``forward`` only marks ``x`` as changed: who calls it writes into ``x`` after that. The gradient
    of ``x`` passes through untouched.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gradient: Callable[[Tensor], Tensor] | None, table: Tensor | None
    ) -> Tensor:
        """``gradient(g)`` gives the gradient of ``table`` in any dtype; autograd casts it."""
        ctx.gradient = gradient
        ctx.shape = None if table is None else table.shape
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradient of ``x``, and that of the table."""
        (g,) = grads
        if ctx.shape is None:
            return g, None, None
        return g, None, ctx.gradient(g).reshape(ctx.shape)
