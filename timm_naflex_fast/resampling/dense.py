"""The definition: ``A_h . P . A_w^T`` as a product of dense float64 matrices.

All else in this package computes this formula faster. The definition itself runs where PyTorch has
to derive it (second derivatives, ``is_grads_batched``), for plain images in every graph, and in
eager code for factorized tables, whose two products are thin. Neither autocast nor TF32 touches
float64.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..batch.grids import GridGroup, ResamplePlan
from ..batch.tokens import Tokens, assemble
from .kept import cached
from .matrices import ResizeSpec, Size, axis_matrix

GroupEmbeddings = Iterable[tuple[GridGroup, Tensor]]
"""Each group with the embeddings (h*w, C) of its grid."""


def resize(table: Tensor, a_h: Tensor, a_w: Tensor) -> Tensor:
    """A learned table (H0, W0, C) resized by ``a_h`` (h, H0) and ``a_w`` (w, W0): (h*w, C). All of
    one dtype."""
    import einx  # here, because it takes seconds

    return einx.dot("h h0, h0 w0 c, w w0 -> (h w) c", a_h, table, a_w)


def resize_factorized(
    tables: Sequence[Tensor], a_h: Tensor, a_w: Tensor, dtype: torch.dtype
) -> Tensor:
    """Two tables (H0, C) and (W0, C), each resized and cast to ``dtype`` as timm casts them, and
    added: (h*w, C)."""
    y, x = (a_h @ tables[0]).to(dtype), (a_w @ tables[1]).to(dtype)  # (h, C), (w, C)
    return (y[:, None] + x).flatten(0, 1)


@cached("dense matrices")
def axis_matrices(
    h: int, w: int, table_size: Size, spec: ResizeSpec, device: torch.device
) -> tuple[Tensor, Tensor]:
    """``A_h`` (h, H0) and ``A_w`` (w, W0), float64; identities for a grid of the table's own
    size."""
    if not spec.use_grid_sample and spec.interpolation != "linear" and (h, w) == table_size:
        y, x = (torch.eye(n, dtype=torch.float64, device=device) for n in table_size)
    else:
        y, x = (
            axis_matrix(axis, (h, w), n0, spec).to(device, torch.float64)
            for axis, n0 in enumerate(table_size)
        )
    return y, x


def resample(tables: Sequence[Tensor], plan: ResamplePlan) -> Iterator[tuple[GridGroup, Tensor]]:
    """Each group with its embeddings: of a table in float64, of two in the tokens' dtype. PyTorch
    can derive all."""
    tables64 = [
        table.view(table.shape[-3 if len(tables) == 1 else -2 :]).double() for table in tables
    ]
    table_size = (
        len(tables64[0]),
        tables64[0].shape[1] if len(tables64) == 1 else len(tables64[1]),
    )
    for group in plan.groups:
        a_h, a_w = axis_matrices(group.h, group.w, table_size, plan.spec, tables64[0].device)
        if len(tables64) == 1:
            yield group, resize(tables64[0], a_h, a_w)
        else:
            yield group, resize_factorized(tables64, a_h, a_w, plan.token_dtype)


def factorized_gradients(
    tokens: Tokens, shapes: Sequence[Sequence[int]], plan: ResamplePlan
) -> list[Tensor]:
    """The gradients (H0, C) and (W0, C) of two tables, float64, from that of the tokens."""
    totals = [torch.zeros(*shape, dtype=torch.float64, device=tokens.device) for shape in shapes]
    table_size = (shapes[0][0], shapes[1][0])
    for group in plan.groups:
        g = tokens.sum(group, torch.promote_types(tokens.dtype, torch.float32)).unflatten(
            0, (group.h, group.w)
        )
        a_h, a_w = axis_matrices(group.h, group.w, table_size, plan.spec, tokens.device)
        totals[0] += a_h.t() @ g.sum(1, dtype=torch.float64)  # of (h, w, C) over w
        totals[1] += a_w.t() @ g.sum(0, dtype=torch.float64)
    return totals


def _by_product(embeddings: Tensor, cell: Tensor) -> Tensor:
    """``embeddings[cell]``; the gradient of an index cannot be batched."""
    return torch.nn.functional.one_hot(cell, len(embeddings)).to(embeddings.dtype) @ embeddings


def gradients_by_autograd(
    g: Tensor, shapes: Sequence[Sequence[int]], plan: ResamplePlan
) -> Sequence[Tensor]:
    """The gradients of tables of these shapes, float64, from that of the tokens ``g``, which can be
    derived again."""
    with torch.enable_grad():
        leaves = [
            torch.zeros(s, dtype=torch.float64, device=g.device, requires_grad=True) for s in shapes
        ]
        embeddings = resample(leaves, plan._replace(token_dtype=torch.float64))
        tokens = assemble(embeddings, plan.counts, _by_product).view(g.shape)
    return torch.autograd.grad(tokens, leaves, g.double(), create_graph=torch.is_grad_enabled())
