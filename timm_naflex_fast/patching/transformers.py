"""transformers: Siglip2's embeddings (Siglip2 NaFlex models, LFM2-VL's tower), and their table.

transformers resizes the table image by image, in float32 on a CPU and in the table's dtype on CUDA. Ours computes in
float32 and casts once. For grids (h, 1) the two differ: PyTorch's antialiased resize to width 1 is wrong for the memory
layout that transformers hands over, and "matmul" is right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends import choose
from ..functional import resample_pos_embeds
from .library import Library, Replacement, original, runs

SIGLIP2 = "transformers.models.siglip2.modeling_siglip2:Siglip2VisionEmbeddings"


def siglip2_forward(self: Any, pixel_values: Tensor, spatial_shapes: Tensor) -> Tensor:
    """Modifications: the whole batch's position embeddings at once; padding tokens get the first cell's, as before."""
    table = self.position_embedding.weight
    unless = "transformers' embeddings in an exported graph" if choose.traced_plainly() else None
    who = runs(LIBRARY, self, (SIGLIP2, "forward"), pixel_values, table, unless=unless)
    if who == "stock":
        return original(type(self), "forward")(self, pixel_values, spatial_shapes)
    tokens = self.patch_embedding(pixel_values.to(self.patch_embedding.weight.dtype))
    side = self.position_embedding_size
    return tokens + _embeddings(table.reshape(side, side, -1), spatial_shapes, pixel_values.shape[1], who)


@torch.compiler.disable  # the sizes are read on the host, as transformers does
def _embeddings(table: Tensor, sizes: Tensor, length: int, strategy: Any) -> Tensor:
    return resample_pos_embeds(table, sizes, mode="bilinear", length=length, padding="first", strategy=strategy)


LIBRARY = Library(
    name="transformers",
    oldest=(5, 23, 0),
    newest=(5, 23, 0),
    root="Siglip2VisionEmbeddings",
    example="transformers.Siglip2VisionModel",
    modes=("stock", "interpolate_cached", "matmul"),
    table={
        (SIGLIP2, "forward"): Replacement(
            "pos_embed",
            siglip2_forward,
            {"matmul": "matmul", "interpolate_cached": "interpolate_cached"},
            "patch_embedding position_embedding position_embedding_size resize_positional_embeddings",
        ),
    },
)
