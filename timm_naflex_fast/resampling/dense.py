"""The definition: ``A_h . P . A_w^T`` as a product of dense float64 matrices.

All else in this package computes this formula faster. The definition itself runs where PyTorch has
to derive it (second derivatives, ``is_grads_batched``). Neither autocast nor TF32 touches float64.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from . import kept
from .matrices import grid_taps
from .spec import ResizeSpec, Size

# The size (h, w) of each grid with its embeddings (h*w, C), in any order.
Embeddings = Iterable[tuple[Size, Tensor]]


def definition(table: Tensor, sizes: Iterable[Size], spec: ResizeSpec) -> Embeddings:
    """The embeddings of each size from a float64 table (H0, W0, C). PyTorch can derive them again."""
    import einx  # here, because it takes seconds

    h0, w0, _ = table.shape
    table_size = h0, w0
    for size in sizes:
        with kept.unseen():
            rows, columns = (
                taps.dense().to(table.device, non_blocking=True)
                for taps in grid_taps(size, table_size, spec, torch.float32)
            )  # (h, H0), (w, W0)
        yield size, einx.dot("h h0, h0 w0 c, w w0 -> (h w) c", rows, table, columns)
