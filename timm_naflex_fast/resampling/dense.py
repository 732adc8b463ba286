"""The definition: ``A_h . P . A_w^T`` as a product of dense float64 matrices.

All else in this package computes this formula faster. The definition itself runs where PyTorch has
to derive it (second derivatives, ``is_grads_batched``), and in eager code for factorized tables,
whose two products are thin. Neither autocast nor TF32 touches float64.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

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


def resample(table: Tensor, sizes: Iterable[Size], spec: ResizeSpec) -> Embeddings:
    """The embeddings, float64, from a table ([1,] H0, W0, C). PyTorch can derive them."""
    import einx  # here, because it takes seconds

    table64 = table.view(table.shape[-3:]).double()
    table_size = (table.shape[-3], table.shape[-2])
    for h, w in sizes:
        how = spec
        if spec.takes_table_itself((h, w), table_size):
            how = replace(spec, ar_preserving=False)  # then both matrices are identities
        a_h, a_w = axis_matrices(h, w, table_size, how, table.device)
        yield (h, w), einx.dot("h h0, h0 w0 c, w w0 -> (h w) c", a_h, table64, a_w)


def resample_factorized(
    tables: Sequence[Tensor], sizes: Iterable[Size], spec: ResizeSpec, dtype: torch.dtype
) -> Embeddings:
    """The embeddings from tables ([1,] H0, C) and ([1,] W0, C).

    Each table's are cast to ``dtype`` before they are added, as in timm. PyTorch can derive them.
    """
    lines_y, lines_x = (table.view(table.shape[-2:]).double() for table in tables)
    for h, w in sizes:
        a_h, a_w = axis_matrices(h, w, (len(lines_y), len(lines_x)), spec, lines_y.device)
        y = (a_h @ lines_y).to(dtype)  # (h, C)
        x = (a_w @ lines_x).to(dtype)  # (w, C)
        yield (h, w), (y[:, None] + x).flatten(0, 1)


def factorized_gradients(
    sizes: Iterable[Size],
    gradient_of: Callable[[Size], Tensor],
    shapes: Sequence[Sequence[int]],
    spec: ResizeSpec,
    device: torch.device,
) -> list[Tensor]:
    """The gradients (H0, C) and (W0, C) of two tables, float64: the transposed map.

    ``gradient_of(size)`` gives the gradient (h*w, C) of the embeddings of a size.
    """
    total_y = torch.zeros(*shapes[0], dtype=torch.float64, device=device)
    total_x = torch.zeros(*shapes[1], dtype=torch.float64, device=device)
    table_size = (shapes[0][0], shapes[1][0])
    for h, w in sizes:
        a_h, a_w = axis_matrices(h, w, table_size, spec, device)
        g = gradient_of((h, w)).unflatten(0, (h, w))  # (h, w, C)
        total_y += a_h.t() @ g.sum(1, dtype=torch.float64)
        total_x += a_w.t() @ g.sum(0, dtype=torch.float64)
    return [total_y, total_x]
