"""transformers: the towers that resample a learned table image by image, each with its replacement.

Siglip2 (also LFM2-VL's tower), Cosmos3-Edge, RADIO's packed images and HunYuan-VL. The whole batch
is resampled at once, in float32 at least, and cast once. transformers >= 5.24 computes Siglip2's
batch at once too, by one product with a weight for each cell of the table. Before, it looped, on
CUDA in the table's own dtype, as Cosmos3-Edge still does. For grids (h, 1) such a loop is wrong:
PyTorch's antialiased resize to width 1 misreads the memory layout that it hands over. Ours is
right.
"""

# The compiler of older torch cannot evaluate the annotations of functions inside functions.
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..functional import resample_pos_embeds
from ..resampling.spec import INTERPOLATIONS
from ..tracing import Context
from .decide import serve
from .library import EXACT_STRATEGIES, Key, Library, Replacement

SIGLIP2 = "transformers.models.siglip2.modeling_siglip2:Siglip2VisionEmbeddings"
COSMOS3 = "transformers.models.cosmos3_edge.modeling_cosmos3_edge:Cosmos3EdgeVisionEmbeddings"
RADIO = "transformers.models.radio.modeling_radio:RadioPatchEmbeddings"
HUNYUAN = "transformers.models.hunyuan_vl.modeling_hunyuan_vl:HunYuanVLVisionPatchEmbed"


def siglip2_forward(self: Any, pixel_values: Tensor, spatial_shapes: Tensor) -> Tensor:
    """Modifications: the whole batch at once; padding tokens get the first cell's, as before."""
    options = {"mode": "bilinear", "length": pixel_values.shape[1], "padding": "first"}
    return _siglip_tokens(SIGLIP2, self, pixel_values, spatial_shapes, options)


def cosmos3_forward(self: Any, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
    """Modifications: the position embeddings of all images and frames at once."""
    options = {"mode": "bilinear", "merge": self.config.spatial_merge_size}
    return _siglip_tokens(COSMOS3, self, pixel_values, grid_thw, options)


def _siglip_tokens(
    path: str, module: Any, pixel_values: Tensor, sizes: Tensor, options: dict[str, Any]
) -> Tensor:
    """What the embeddings of a Siglip tower return."""

    def tokens(embeddings: Tensor) -> Tensor:
        return _project(module, pixel_values) + embeddings

    side = module.position_embedding_size
    table_at = module.position_embedding, "weight"
    arguments = module, pixel_values, sizes
    return _with_embeddings((path, "forward"), arguments, table_at, (side, side), options, tokens)


def radio_embed_packed_patches(self: Any, pixel_values: Tensor, image_grid_hw: Tensor) -> Tensor:
    """Modifications: all images at once; then each image after its prefix, as before."""

    def tokens(embeddings: Tensor) -> Tensor:
        tokens = self.patch_projection(pixel_values)
        tokens = tokens + embeddings.to(tokens.dtype)
        parts = []
        # The class and register tokens have no place on a grid, so they get no embedding.
        for image in tokens.split(image_grid_hw.prod(1).tolist()):
            parts += [self.cls_register_token, image]
        return torch.cat(parts)[None]

    key = RADIO, "_embed_packed_patches"
    size = self.max_rows, self.max_cols
    options = {"mode": "bilinear", "antialias": False, "ar_preserving": True}
    table_at = self, "position_embedding"
    arguments = self, pixel_values, image_grid_hw
    return _with_embeddings(key, arguments, table_at, size, options, tokens)


def hunyuan_forward(self: Any, pixel_values: Tensor, grid_thw: Any) -> Tensor:
    """Modifications: the position embeddings of all images and frames at once."""

    def tokens(embeddings: Tensor) -> Tensor:
        shape = self.config.num_channels, self.patch_size, self.patch_size
        tokens = _project(self, pixel_values.reshape(-1, *shape)).flatten(1)
        return (tokens + embeddings.to(tokens.dtype))[None]

    key = HUNYUAN, "forward"
    size = self.position_edge, self.position_edge
    options = {"mode": self.config.interpolate_mode, "antialias": False}
    table_at = self.position_embedding, "weight"
    arguments = self, pixel_values, grid_thw
    return _with_embeddings(key, arguments, table_at, size, options, tokens)


def _with_embeddings(
    key: Key,
    arguments: tuple[Any, Tensor, Any],
    table_at: tuple[Any, str],
    size: tuple[int, int],
    options: dict[str, Any],
    tokens: Callable[[Tensor], Tensor],
) -> Tensor:
    """The tokens of a tower with their position embeddings, as chosen.

    Args:
        key: of the replaced method.
        arguments: of that method: the tower, its patches, and sizes as
            ``functional.resample_pos_embeds`` takes them, and ``options``.
        table_at: a module, and the name of its table: the cells (h0 * w0, C), perhaps after the
            class token's.
        size: (h0, w0).
        options: see above.
        tokens: what the method returns, from the position embeddings.
    """
    _, pixel_values, sizes = arguments
    # HunYuan-VL's mode stands in the model's configuration, and may be any of PyTorch's.
    reason = None
    if options["mode"] not in INTERPOLATIONS:
        reason = f"a table resized by {options['mode']}"

    def ours(strategy: Any, tables: tuple[Tensor, ...], context: Context) -> Tensor | str:
        is_packed = "length" not in options
        if is_packed and context == "export":
            return "a packed batch in an exported graph"
        h0, w0 = size
        # The cells come last: HunYuan-VL's table holds a row for the class token before them.
        table = tables[0].flatten(0, -2)[-h0 * w0 :].unflatten(0, size)  # (h0, w0, C)
        # Packed sizes in a tensor have to be read on the host: a graph breaks there, as in
        # transformers.
        resample = resample_pos_embeds
        if is_packed and isinstance(sizes, Tensor) and torch.compiler.is_dynamo_compiling():
            resample = _outside_graphs
        return tokens(resample(table, sizes, strategy=strategy, **options))

    return serve(LIBRARY, key, arguments, ours, pixel_values, tables_at=table_at, reason=reason)


def _project(embeddings: Any, pixel_values: Tensor) -> Tensor:
    return embeddings.patch_embedding(pixel_values.to(embeddings.patch_embedding.weight.dtype))


# ``torch.compiler.disable`` imports the compiler at once, this one where it is called.
_outside_graphs = torch._disable_dynamo(resample_pos_embeds)

_RESIZE = "resize_positional_embeddings"
REPLACEMENTS = {
    (SIGLIP2, "forward"): Replacement("pos_embed", siglip2_forward, EXACT_STRATEGIES, (_RESIZE,)),
    (COSMOS3, "forward"): Replacement("pos_embed", cosmos3_forward, EXACT_STRATEGIES, (_RESIZE,)),
    (RADIO, "_embed_packed_patches"): Replacement(
        "pos_embed",
        radio_embed_packed_patches,
        EXACT_STRATEGIES,
        ("_interpolate_position_embedding",),
    ),
    (HUNYUAN, "forward"): Replacement(
        "pos_embed", hunyuan_forward, EXACT_STRATEGIES, ("interpolate_pos_encoding",)
    ),
}

LIBRARY = Library(
    name="transformers",
    oldest=(5, 21, 0),
    newest=(5, 24, 0),
    modes=("stock", *EXACT_STRATEGIES),
    not_served={
        "transformers.models.siglip.modeling_siglip:SiglipVisionEmbeddings": "SigLIP and SigLIP-2 "
        "of a fixed resolution, model_type 'siglip'"
    },
    replacements=REPLACEMENTS,
    reads={
        SIGLIP2: {
            "forward": f"patch_embedding position_embedding position_embedding_size {_RESIZE}",
            _RESIZE: "LongTensor Tensor arange cat div float32",
        },
        COSMOS3: {
            "forward": "config patch_embedding position_embedding position_embedding_size "
            f"{_RESIZE}",
            _RESIZE: "LongTensor Tensor cat interpolate",
        },
        RADIO: {
            "_embed_packed_patches": "_interpolate_position_embedding cls_register_token "
            "patch_projection",
            "_interpolate_position_embedding": "max_cols max_rows position_embedding",
        },
        HUNYUAN: {
            "forward": "config interpolate_pos_encoding patch_embedding patch_size",
            "interpolate_pos_encoding": "config embed_dim position_edge position_embedding",
        },
    },
)
