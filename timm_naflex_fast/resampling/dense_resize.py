"""``sparse_resize`` once more as products of dense float64 matrices, of operations that PyTorch can differentiate.

Slower. It runs for second derivatives and for ``is_grads_batched``: PyTorch derives the transpose from it. Float64 is
touched neither by autocast nor by TF32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .grids import GridGroup, TokenCounts
from .matrices import ResizeSpec, axis_matrix

Embeddings = Iterable[tuple[GridGroup, Tensor]]
"""Each group with the embeddings (h*w, C) of its grid."""


def resample(tables: Sequence[Tensor], groups: list[GridGroup], spec: ResizeSpec) -> Iterator[tuple[GridGroup, Tensor]]:
    """Each group with its embeddings: of a table (H0, W0, C), or the sum ``y + x`` of two, (H0, C) and (W0, C)."""
    table = tables[0]
    size = (len(table), table.shape[1] if len(tables) == 1 else len(tables[1]))
    for group in groups:
        a_h, a_w = (
            axis_matrix(axis, group.h, group.w, n0, spec).to(table.device, table.dtype, non_blocking=True)
            for axis, n0 in enumerate(size)
        )
        if len(tables) == 2:
            yield group, ((a_h @ table)[:, None] + a_w @ tables[1]).flatten(0, 1)
        elif spec.copies_own_size and (group.h, group.w) == size:
            yield group, table.flatten(0, 1)
        else:
            strip = (a_h @ table.flatten(1)).view(group.h, *table.shape[1:])  # (h, W0, C)
            yield group, torch.matmul(a_w, strip).flatten(0, 1)


def gradients_by_autograd(
    g: Tensor, shapes: Sequence[Sequence[int]], make: Callable[[list[Tensor]], Embeddings], counts: TokenCounts
) -> Sequence[Tensor]:
    """The gradients of some leaves of these shapes, float64, from that of the tokens ``g``.

    ``make(leaves)`` computes the embeddings of all groups, which ``Tokens.add`` would add to the tokens (``counts``).
    """
    with torch.enable_grad():
        leaves = [torch.zeros(s, dtype=torch.float64, device=g.device, requires_grad=True) for s in shapes]
        parts = {}
        for group, embeddings in make(leaves):
            padding = embeddings[:1] if group.embeds_padding else torch.zeros_like(embeddings[:1])
            if group.cell_of_token is None:
                embeddings = embeddings[: group.tokens]
            else:  # a product, because the gradient of an index cannot be batched
                cell = group.cell_of_token.to(g.device, non_blocking=True)
                embeddings = torch.nn.functional.one_hot(cell, len(embeddings)).double() @ embeddings
            for sample in group.samples:
                parts[sample] = torch.cat((embeddings, padding.expand(counts[sample][1], -1)))
        tokens = torch.cat([parts[sample] for sample in range(len(counts))]).view(g.shape)
    return torch.autograd.grad(tokens, leaves, g.double(), create_graph=torch.is_grad_enabled())
