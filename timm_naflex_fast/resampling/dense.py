"""The definition: ``A_h . P . A_w^T`` as a product of dense float64 matrices.

All else in this package computes this formula faster. The definition itself runs where PyTorch has
to derive it (second derivatives, ``is_grads_batched``). Neither autocast nor TF32 touches float64.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from .kept import kept_by_arguments
from .matrices import axis_matrix
from .spec import ResizeSpec, Size

Embeddings = Iterator[tuple[Size, Tensor]]
"""The size (h, w) of each grid with its embeddings (h*w, C), in any order."""


@kept_by_arguments
def axis_matrices(
    h: int, w: int, table_size: Size, spec: ResizeSpec, device: torch.device
) -> tuple[Tensor, Tensor]:
    """``A_h`` (h, H0) and ``A_w`` (w, W0), float64."""
    h0, w0 = table_size
    y = axis_matrix(0, (h, w), h0, spec).to(device, torch.float64)
    x = axis_matrix(1, (h, w), w0, spec).to(device, torch.float64)
    return y, x


def definition(table: Tensor, sizes: Iterable[Size], spec: ResizeSpec) -> Embeddings:
    """The embeddings of each size from a float64 table (H0, W0, C). PyTorch can derive them again."""
    import einx  # here, because it takes seconds

    h0, w0, _ = table.shape
    for size in sizes:
        of_size = spec
        if size == spec.own_size((h0, w0)):
            of_size = spec._replace(ar_preserving=False)  # then both matrices are identities
        rows, columns = axis_matrices(*size, (h0, w0), of_size, table.device)
        yield size, einx.dot("h h0, h0 w0 c, w w0 -> (h w) c", rows, table, columns)
