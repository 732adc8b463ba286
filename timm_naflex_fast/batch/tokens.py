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
from .plan import Group, Plan, TokenCounts


@dataclass
class Tokens:
    """The tokens ``x`` of a batch, (B, N, C) or packed (T, C), or their gradients.

    ``counts``: of each sample, how many of its tokens lie in the grid, and how many come after.
    """

    x: Tensor
    counts: TokenCounts
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
        if self.x.ndim == 3 and not self.x.is_contiguous():
            parts: list[Tensor] = []
            for sample, count in zip(self.x, self.counts):
                parts += sample.split_with_sizes(count)
            return parts
        return self.x.flatten(0, -2).split_with_sizes(list(chain.from_iterable(self.counts)))

    def in_grid(self, sample: int) -> Tensor:
        """The tokens of a sample that lie in its grid, (tokens, C)."""
        return self.parts[2 * sample]

    def after_grid(self, sample: int) -> Tensor:
        """The tokens of a sample that come after its grid: padding."""
        return self.parts[2 * sample + 1]

    def whole_batch(self, group: Group) -> Tensor | None:
        """The tokens in the grid, (B, tokens, C), if one operation serves all samples.

        Then they share the grid, and the order of their tokens: one image may have any. None where
        they differ, or get embeddings at padding too.
        """
        batch = len(self.counts)
        if batch == 0 or self.x.ndim != 3 or len(group.samples) != batch:
            return None
        if group.cell_index and batch > 1:
            return None
        count, after = self.counts[0]
        if not after:
            return self.x
        return None if group.embeds_padding else self.x[:, :count]

    def add(self, group: Group, embeddings: Tensor) -> None:
        """Add a group's embeddings (h*w, C) to the tokens of its samples, in place."""
        embeddings = embeddings.to(self.x.dtype)
        if group.order is not None:
            embeddings = embeddings.index_select(0, group.order)

        # All images of one size, or one image: one addition.
        whole = self.whole_batch(group)
        if whole is not None:
            whole.add_(self._added_to(0, group, embeddings))
            return

        # Otherwise sample by sample. These are views of x, so each addition writes into x itself.
        for sample in group.samples:
            self.in_grid(sample).add_(self._added_to(sample, group, embeddings))
            if group.embeds_padding:
                self.after_grid(sample).add_(embeddings[:1])

    def _added_to(self, sample: int, group: Group, embeddings: Tensor) -> Tensor:
        """The embeddings of a sample's tokens: those of its cells, or of the first cells."""
        if sample in group.cell_index:
            return embeddings.index_select(0, group.cell_index[sample])
        count, _ = self.counts[sample]
        return embeddings[:count]

    def sum_over_samples(self, group: Group, dtype: torch.dtype) -> Tensor:
        """The transpose of ``add``: the sum (h*w, C) over a group's samples, in ``dtype``.

        It may be a view of the tokens.
        """
        summed = self._sum_in_order(group, dtype)
        if group.order is None:
            return summed
        # Row n is the sum of the tokens n, which took cell ``order[n]``.
        return torch.empty_like(summed).index_copy_(0, group.order, summed)

    def _sum_in_order(self, group: Group, dtype: torch.dtype) -> Tensor:
        """The sum of what ``add`` adds if the group has no ``order``."""
        cells = group.h * group.w
        count, _ = self.counts[group.samples[0]]

        # If all samples are complete and in order, as most are, their tokens are the cells.
        if count == cells and not (group.cell_index or group.embeds_padding):
            if len(group.samples) == 1:
                return self.in_grid(group.samples[0]).to(dtype).contiguous()
            whole = self.whole_batch(group)
            if whole is not None:
                return whole.sum(0, dtype=dtype)

        # Otherwise sample by sample, each token into the row of its cell.
        total = BlockSum(cells, dtype)
        for sample in group.samples:
            total.add(self.in_grid(sample), group.cell_index.get(sample))
        summed = total.total()
        if group.embeds_padding:
            padding = [self.after_grid(sample).sum(0, dtype=dtype) for sample in group.samples]
            summed[0] += torch.stack(padding).sum(0)
        return summed


def assemble(plan: Plan, embeddings: Iterable[tuple[Size, Tensor]]) -> Tensor:
    """What ``Tokens.add`` adds to each token, (T, C), in a new tensor: -0.0 where it adds nothing.

    PyTorch can derive it any number of times, and batches of its gradients: those of an embedding
    can be batched, those of an index cannot.
    """
    parts = {}
    for size, of_grid in embeddings:
        group = plan.groups[size]
        if group.order is not None:
            of_grid = F.embedding(group.order, of_grid)
        padding = of_grid[:1] if group.embeds_padding else torch.full_like(of_grid[:1], -0.0)
        for sample in group.samples:
            in_grid, after = plan.counts[sample]
            cell = group.cell_index.get(sample)
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
    """Tells autograd that something linear in the tables is added into ``x``, in place.

    ``forward`` only marks ``x`` as changed: who calls it writes into ``x`` after that. The gradient
    of ``x`` passes through untouched.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gradients: Callable[[Tensor], Iterable[Tensor]] | None, *tables: Tensor
    ) -> Tensor:
        """``gradients(g)`` gives the gradients of ``tables``, in any dtype; None without tables."""
        ctx.gradients = gradients
        ctx.shapes = [table.shape for table in tables]
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradient of ``x``, and those of the tables in their shapes; autograd casts them."""
        (g,) = grads
        if not ctx.shapes:
            return g, None
        of_tables = [grad.reshape(shape) for grad, shape in zip(ctx.gradients(g), ctx.shapes)]
        return g, None, *of_tables
