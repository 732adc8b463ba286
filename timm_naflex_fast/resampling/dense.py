"""The definition: ``A_h . P . A_w^T`` as a product of dense float64 matrices.

All else in this package computes this formula faster. The definition itself runs where PyTorch has
to derive it (second derivatives, ``is_grads_batched``), and in eager code for factorized tables,
whose two products are thin. Neither autocast nor TF32 touches float64.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from .kept import kept_by_arguments
from .matrices import axis_matrix
from .spec import ResizeSpec, Size


@kept_by_arguments
def axis_matrices(
    h: int, w: int, table_size: Size, spec: ResizeSpec, device: torch.device
) -> tuple[Tensor, Tensor]:
    """``A_h`` (h, H0) and ``A_w`` (w, W0), float64."""
    h0, w0 = table_size
    y = axis_matrix(0, (h, w), h0, spec).to(device, torch.float64)
    x = axis_matrix(1, (h, w), w0, spec).to(device, torch.float64)
    return y, x


Embeddings = Iterator[tuple[Size, Tensor]]
"""The size (h, w) of each grid with its embeddings (h*w, C), in any order."""


def definition(rows: Tensor, table: Tensor, columns: Tensor) -> Tensor:
    """The embeddings (h*w, C) of a table (H0, W0, C) by ``A_h`` and ``A_w``."""
    import einx  # here, because it takes seconds

    embeddings: Tensor = einx.dot("h h0, h0 w0 c, w w0 -> (h w) c", rows, table, columns)
    return embeddings


def factorized_gradients(
    sizes: Iterable[Size],
    gradient_of: Callable[[Size], Tensor],
    shapes: list[Sequence[int]],
    spec: ResizeSpec,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Tensor]:
    """The gradients (H0, C) and (W0, C) of two tables, float64 whatever ``dtype`` is.

    ``gradient_of(size)`` gives the gradient (h*w, C) of the embeddings of a size.
    """
    total_y = torch.zeros(*shapes[0], dtype=torch.float64, device=device)
    total_x = torch.zeros(*shapes[1], dtype=torch.float64, device=device)
    table_size = (shapes[0][0], shapes[1][0])
    for h, w in sizes:
        a_h, a_w = axis_matrices(h, w, table_size, spec, device)
        # A line is added in every cell of its row or column, so their gradients are summed first.
        g = gradient_of((h, w)).unflatten(0, (h, w))  # (h, w, C)
        total_y += a_h.t() @ g.sum(1, dtype=torch.float64)
        total_x += a_w.t() @ g.sum(0, dtype=torch.float64)
    return [total_y, total_x]
