"""transformers: the methods of its towers that resample a learned table, each with its replacement.

Siglip2 (also LFM2-VL's tower), Cosmos3-Edge, RADIO and HunYuan-VL. Ours computes in float32 at
least, and casts once. transformers >= 5.24 computes Siglip2's batch at once, by one product with a
weight for each cell of the table. Before, it looped, on CUDA in the table's own dtype, as
Cosmos3-Edge still does. For grids (h, 1) such a loop is wrong: PyTorch's antialiased resize to
width 1 misreads the memory layout that it hands over. Ours is right.

The towers' ``forward`` stays transformers' own. So ours is called, too, where another package has
saved it before, as accelerate's hooks do.

Tests: tests/patching/test_transformers.py.
"""

# The compiler of older torch cannot evaluate the annotations of functions inside functions.
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..functional import resample_pos_embeds
from ..tracing import why_unsupported
from .calls import Replacement
from .library import EXACT_STRATEGIES, Library

SIGLIP2 = "transformers.models.siglip2.modeling_siglip2:Siglip2VisionEmbeddings"
COSMOS3 = "transformers.models.cosmos3_edge.modeling_cosmos3_edge:Cosmos3EdgeVisionEmbeddings"
RADIO = "transformers.models.radio.modeling_radio:RadioPatchEmbeddings"
HUNYUAN = "transformers.models.hunyuan_vl.modeling_hunyuan_vl:HunYuanVLVisionPatchEmbed"
RESIZE = "resize_positional_embeddings"

LIBRARY = Library(
    name="transformers",
    oldest="5.21.0",
    newest="5.24.0",
    modes=("stock", *EXACT_STRATEGIES),
    not_served=(
        "transformers.models.hy_v4_vl.modeling_hy_v4_vl:HYV4VLVisionPatchEmbed",
        "transformers.models.vilt.modeling_vilt:ViltEmbeddings",
    ),
    reads={
        SIGLIP2: {
            "forward": f"patch_embedding position_embedding position_embedding_size {RESIZE}",
            RESIZE: "LongTensor Tensor arange cat div float32",
        },
        COSMOS3: {
            "forward": "config patch_embedding position_embedding position_embedding_size "
            f"{RESIZE}",
            RESIZE: "LongTensor Tensor cat interpolate",
        },
        RADIO: {"_interpolate_position_embedding": "max_cols max_rows position_embedding"},
        HUNYUAN: {
            "forward": "config interpolate_pos_encoding patch_embedding patch_size",
            "interpolate_pos_encoding": "config embed_dim position_edge position_embedding",
        },
    },
)


def _replaces(path: str, name: str) -> Replacement:
    return Replacement(LIBRARY, (path, name), "pos_embed", EXACT_STRATEGIES)


def _resampled(
    strategy: Any, table: Tensor, sizes: Any, *, axes: int = 2, **options: Any
) -> Tensor | str:
    """The embeddings of images; or in words why transformers' own code has to run.

    ``axes``: how many numbers a tensor has to have for an image. With others ours gives embeddings,
    where transformers raises an error.
    """
    if isinstance(sizes, Tensor) and sizes.shape[-1] != axes:
        return f"sizes of other than {axes} numbers"
    reason = why_unsupported(table)
    if reason is not None:
        return reason
    try:
        return resample_pos_embeds(table, sizes, strategy=strategy, **options)
    except ValueError as error:
        return str(error)


# ``torch.compiler.disable`` imports the compiler at once, this one where it is called.
_outside_graphs = torch._disable_dynamo(_resampled)


def _packed(strategy: Any, table: Tensor, sizes: Any, **options: Any) -> Tensor | str:
    """The same without padding: sizes in a tensor have to be read on the host. A graph breaks there,
    as in transformers."""
    is_tensor = isinstance(sizes, Tensor)  # torch 2.11 would make a graph of the index alone
    if torch.compiler.is_dynamo_compiling() and (is_tensor or isinstance(sizes[0][0], Tensor)):
        return _outside_graphs(strategy, table, sizes, **options)
    return _resampled(strategy, table, sizes, **options)


@_replaces(SIGLIP2, RESIZE)
def resize_siglip2(
    strategy: Any, positional_embeddings: Tensor, spatial_shapes: Any, max_length: int
) -> Any:
    """Modifications: the whole batch at once; padding tokens get the first cell's, as before."""
    return _resampled(
        strategy,
        positional_embeddings,
        spatial_shapes,
        mode="bilinear",
        length=max_length,
        padding="first",
    )


@_replaces(COSMOS3, RESIZE)
def resize_cosmos3(
    strategy: Any, positional_embeddings: Tensor, grid_thw: Any, spatial_merge_size: int
) -> Any:
    """Modifications: all images and frames at once."""
    return _packed(
        strategy,
        positional_embeddings,
        grid_thw,
        axes=3,
        mode="bilinear",
        merge=spatial_merge_size,
    )


def _image(
    strategy: Any, table: Tensor, size: Any, dtype: torch.dtype, **options: Any
) -> Tensor | str:
    """The embeddings of one image, (1, h * w, C), cast once from float32 to ``dtype``."""
    # They come in the dtype of their table: a cast of half precision would be a second one.
    if table.dtype != dtype:
        table = table.to(torch.promote_types(table.dtype, torch.float32))
    embeddings = _packed(strategy, table, [size], antialias=False, **options)
    if isinstance(embeddings, str):
        return embeddings
    return embeddings.to(dtype)[None]


@_replaces(RADIO, "_interpolate_position_embedding")
def interpolate_radio(strategy: Any, self: Any, input_dims: Any, dtype: torch.dtype) -> Any:
    """Modifications: of the square around the grid, only what is kept."""
    weight = self.position_embedding  # (1, h0 * w0, C)
    table = weight.reshape(1, self.max_rows, self.max_cols, -1)[0]  # (h0, w0, C)
    return _image(strategy, table, input_dims, dtype, mode="bilinear", ar_preserving=True)


@_replaces(HUNYUAN, "interpolate_pos_encoding")
def interpolate_hunyuan(
    strategy: Any, self: Any, embeddings: Tensor, height: Any, width: Any
) -> Any:
    """Modifications: in float32 at least."""
    # The table holds a row for the class token before the cells.
    edge = self.position_edge
    table = self.position_embedding.weight[1:].reshape(1, edge, edge, self.embed_dim)[0]
    # It may be any of PyTorch's modes.
    mode = self.config.interpolate_mode
    return _image(strategy, table, (height, width), embeddings.dtype, mode=mode)
