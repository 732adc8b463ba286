"""transformers: the towers that resample a learned table image by image, each with its replacement.

Siglip2 (also LFM2-VL's tower), Cosmos3-Edge, RADIO's packed images and HunYuan-VL. The whole batch
is resampled at once, in float32 at least, and cast once. transformers >= 5.24 computes Siglip2's
batch at once too, by one product with a weight for each cell of the table. Before, it looped, on
CUDA in the table's own dtype, as Cosmos3-Edge still does. For grids (h, 1) such a loop is wrong:
PyTorch's antialiased resize to width 1 misreads the memory layout that it hands over. Ours is
right.
"""

from typing import Any

import torch
from torch import Tensor

from ..functional import resample_pos_embeds
from .library import AS_INTERPOLATE, Library, Replacement, decide, original

SIGLIP2 = "transformers.models.siglip2.modeling_siglip2:Siglip2VisionEmbeddings"
COSMOS3 = "transformers.models.cosmos3_edge.modeling_cosmos3_edge:Cosmos3EdgeVisionEmbeddings"
RADIO = "transformers.models.radio.modeling_radio:RadioPatchEmbeddings"
HUNYUAN = "transformers.models.hunyuan_vl.modeling_hunyuan_vl:HunYuanVLVisionPatchEmbed"


def siglip2_forward(self: Any, pixel_values: Tensor, spatial_shapes: Tensor) -> Tensor:
    """Modifications: the whole batch's position embeddings at once; padding tokens get the first
    cell's, as before."""
    key = SIGLIP2, "forward"
    strategy, tables, *_ = decide(
        LIBRARY, key, self, pixel_values, tables_at=(self.position_embedding, "weight")
    )
    if strategy == "stock":
        return original(key)(self, pixel_values, spatial_shapes)
    table = tables[0].reshape(*[self.position_embedding_size] * 2, -1)
    options: dict[str, Any] = dict(
        mode="bilinear", length=pixel_values.shape[1], padding="first", strategy=strategy
    )
    return _linear(self, pixel_values) + resample_pos_embeds(table, spatial_shapes, **options)


def cosmos3_forward(self: Any, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
    """Modifications: the position embeddings of all images and frames at once."""
    key = COSMOS3, "forward"
    strategy, tables, *_ = decide(
        LIBRARY, key, self, pixel_values, tables_at=(self.position_embedding, "weight")
    )
    if strategy == "stock":
        return original(key)(self, pixel_values, grid_thw)
    tokens, merge = _linear(self, pixel_values), self.config.spatial_merge_size
    table = tables[0].reshape(*[self.position_embedding_size] * 2, -1)
    return tokens + _packed_embeddings(
        len(tokens), table, grid_thw, mode="bilinear", merge=merge, strategy=strategy
    )


def radio_embed_packed_patches(self: Any, pixel_values: Tensor, image_grid_hw: Tensor) -> Tensor:
    """Modifications: the position embeddings of all images at once; then each image after its
    prefix, as before."""
    key = RADIO, "_embed_packed_patches"
    strategy, tables, *_ = decide(
        LIBRARY, key, self, pixel_values, tables_at=(self, "position_embedding")
    )
    if strategy == "stock":
        return original(key)(self, pixel_values, image_grid_hw)
    tokens, options = (
        self.patch_projection(pixel_values),
        dict(mode="bilinear", antialias=False, ar_preserving=True),
    )
    table = tables[0].reshape(self.max_rows, self.max_cols, -1).float()
    embeddings = _packed_embeddings(len(tokens), table, image_grid_hw, **options, strategy=strategy)
    images = (tokens + embeddings.to(tokens.dtype)).split(image_grid_hw.prod(1).tolist())
    return torch.cat([part for image in images for part in (self.cls_register_token, image)])[None]


def hunyuan_forward(self: Any, pixel_values: Tensor, grid_thw: Any) -> Tensor:
    """Modifications: the position embeddings of all images and frames at once."""
    key, mode = (HUNYUAN, "forward"), self.config.interpolate_mode
    reason = None if mode in ("bilinear", "bicubic") else f"a table resized by {mode}"
    tables_at = self.position_embedding, "weight"
    strategy, tables, *_ = decide(
        LIBRARY, key, self, pixel_values, tables_at=tables_at, reason=reason
    )
    if strategy == "stock":
        return original(key)(self, pixel_values, grid_thw)
    table = (
        tables[0][1:].reshape(self.position_edge, self.position_edge, -1).float()
    )  # without the class token's row
    tokens = _linear(
        self, pixel_values.reshape(-1, self.config.num_channels, *[self.patch_size] * 2)
    ).flatten(1)
    tokens_given = None if len(tokens) == 1 else len(tokens)  # one for all positions
    embeddings = _packed_embeddings(
        tokens_given, table, grid_thw, mode=mode, antialias=False, strategy=strategy
    )
    return (tokens + embeddings.to(tokens.dtype))[None]


def _linear(embeddings: Any, pixel_values: Tensor) -> Tensor:
    return embeddings.patch_embedding(pixel_values.to(embeddings.patch_embedding.weight.dtype))


def _packed_embeddings(tokens: int | None, table: Tensor, sizes: Any, **options: Any) -> Tensor:
    """The packed position embeddings, in the table's dtype, for so many tokens; None: for however
    many.

    A tensor of sizes has to be read on the host: a graph breaks there, as in transformers.

    Raises:
        ValueError: the sizes name another number of tokens, or a size cannot be merged.
    """
    breaks = isinstance(sizes, Tensor) and torch.compiler.is_dynamo_compiling()
    embeddings = (_outside_graphs if breaks else resample_pos_embeds)(table, sizes, **options)
    if tokens not in (None, len(embeddings)):
        raise ValueError(
            f"the grids have {len(embeddings)} patches together; pixel_values has {tokens}"
        )
    return embeddings


# ``torch.compiler.disable`` imports the compiler at once, this one where it is called.
_outside_graphs = torch._disable_dynamo(resample_pos_embeds)

_NOT_EXPORTED = "a packed batch in an exported graph"
_RESIZE, _INTERPOLATE = "resize_positional_embeddings", "_interpolate_position_embedding"
_RADIO_READS = f"{_INTERPOLATE} cls_register_token patch_projection"
_SIGLIP2_READS = f"patch_embedding position_embedding position_embedding_size {_RESIZE}"
_HUNYUAN_READS = "config interpolate_pos_encoding patch_embedding patch_size"

LIBRARY = Library(
    name="transformers",
    oldest=(5, 21, 0),
    newest=(5, 24, 0),
    model_classes=tuple(path.partition(":")[2] for path in (SIGLIP2, COSMOS3, RADIO, HUNYUAN)),
    example="transformers.Siglip2VisionModel",
    replacements={
        (path, name): Replacement(
            "pos_embed",
            function,
            AS_INTERPOLATE,
            attributes,
            skips=(("", skipped),),
            not_exported=not_exported,
        )
        for path, name, function, attributes, skipped, not_exported in (
            (SIGLIP2, "forward", siglip2_forward, _SIGLIP2_READS, _RESIZE, None),
            (
                COSMOS3,
                "forward",
                cosmos3_forward,
                f"{_SIGLIP2_READS} config",
                _RESIZE,
                _NOT_EXPORTED,
            ),
            (
                RADIO,
                "_embed_packed_patches",
                radio_embed_packed_patches,
                _RADIO_READS,
                _INTERPOLATE,
                _NOT_EXPORTED,
            ),
            (
                HUNYUAN,
                "forward",
                hunyuan_forward,
                _HUNYUAN_READS,
                "interpolate_pos_encoding",
                _NOT_EXPORTED,
            ),
        )
    },
    copied_methods={
        (SIGLIP2, _RESIZE): "LongTensor Tensor arange cat div float32",
        (COSMOS3, _RESIZE): "LongTensor Tensor cat interpolate",
        (RADIO, "_interpolate_position_embedding"): "max_cols max_rows position_embedding",
        (HUNYUAN, "interpolate_pos_encoding"): "config embed_dim position_edge position_embedding",
    },
)
