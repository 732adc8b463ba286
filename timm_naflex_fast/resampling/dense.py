"""The definition: ``A_h . P . A_w^T`` as a product of dense float64 matrices.

All else in this package computes this formula faster. The definition itself runs where PyTorch has
to derive it (second derivatives, ``is_grads_batched``). Neither autocast nor TF32 touches float64.
"""

from collections.abc import Iterable, Iterator

from torch import Tensor

from . import kept
from .matrices import axis_matrix
from .spec import ResizeSpec, Size

Embeddings = Iterator[tuple[Size, Tensor]]
"""The size (h, w) of each grid with its embeddings (h*w, C), in any order."""


def definition(table: Tensor, sizes: Iterable[Size], spec: ResizeSpec) -> Embeddings:
    """The embeddings of each size from a float64 table (H0, W0, C). PyTorch can derive them again."""
    import einx  # here, because it takes seconds

    h0, w0, _ = table.shape
    for size in sizes:
        of_size = spec
        if size == spec.own_size((h0, w0)):
            of_size = spec._replace(ar_preserving=False)  # then both matrices are identities
        with kept.unseen():
            on_host = axis_matrix(0, size, h0, of_size), axis_matrix(1, size, w0, of_size)
            rows, columns = (
                a.double().to(table.device, non_blocking=True) for a in on_host
            )  # (h, H0), (w, W0)
        yield size, einx.dot("h h0, h0 w0 c, w w0 -> (h w) c", rows, table, columns)
