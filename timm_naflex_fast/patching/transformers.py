"""transformers: the towers that resample a learned table image by image, each with its replacement.

Siglip2 (also LFM2-VL's tower), Cosmos3-Edge, RADIO's packed images and HunYuan-VL. The whole batch
is resampled at once, in float32 at least, and cast once. transformers >= 5.24 computes Siglip2's
batch at once too, by one product with a weight for each cell of the table. Before, it looped, on
CUDA in the table's own dtype, as Cosmos3-Edge still does. For grids (h, 1) such a loop is wrong:
PyTorch's antialiased resize to width 1 misreads the memory layout that it hands over. Ours is
right.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..functional import resample_pos_embeds
from ..resampling.spec import INTERPOLATIONS
from .decide import Decision, choose, count, lacks_operator
from .library import AS_INTERPOLATE, Calls, Key, Library, Replacement, original

SIGLIP2 = "transformers.models.siglip2.modeling_siglip2:Siglip2VisionEmbeddings"
COSMOS3 = "transformers.models.cosmos3_edge.modeling_cosmos3_edge:Cosmos3EdgeVisionEmbeddings"
RADIO = "transformers.models.radio.modeling_radio:RadioPatchEmbeddings"
HUNYUAN = "transformers.models.hunyuan_vl.modeling_hunyuan_vl:HunYuanVLVisionPatchEmbed"


def siglip2_forward(self: Any, pixel_values: Tensor, spatial_shapes: Tensor) -> Tensor:
    """Modifications: the whole batch at once; padding tokens get the first cell's, as before."""
    key = SIGLIP2, "forward"
    side = self.position_embedding_size
    embeddings = _resampled(
        key,
        self,
        pixel_values,
        spatial_shapes,
        table_at=(self.position_embedding, "weight"),
        as_table=lambda weight: weight.reshape(side, side, -1),
        mode="bilinear",
        length=pixel_values.shape[1],
        padding="first",
    )
    if embeddings is None:
        return original(key)(self, pixel_values, spatial_shapes)
    return _project(self, pixel_values) + embeddings


def cosmos3_forward(self: Any, pixel_values: Tensor, grid_thw: Tensor) -> Tensor:
    """Modifications: the position embeddings of all images and frames at once."""
    key = COSMOS3, "forward"
    side = self.position_embedding_size
    embeddings = _resampled(
        key,
        self,
        pixel_values,
        grid_thw,
        table_at=(self.position_embedding, "weight"),
        as_table=lambda weight: weight.reshape(side, side, -1),
        mode="bilinear",
        merge=self.config.spatial_merge_size,
    )
    if embeddings is None:
        return original(key)(self, pixel_values, grid_thw)
    tokens = _project(self, pixel_values)
    _check_count(len(embeddings), len(tokens))
    return tokens + embeddings


def radio_embed_packed_patches(self: Any, pixel_values: Tensor, image_grid_hw: Tensor) -> Tensor:
    """Modifications: all images at once; then each image after its prefix, as before."""
    key = RADIO, "_embed_packed_patches"
    embeddings = _resampled(
        key,
        self,
        pixel_values,
        image_grid_hw,
        table_at=(self, "position_embedding"),
        as_table=lambda weight: weight.reshape(self.max_rows, self.max_cols, -1).float(),
        mode="bilinear",
        antialias=False,
        ar_preserving=True,
    )
    if embeddings is None:
        return original(key)(self, pixel_values, image_grid_hw)
    tokens = self.patch_projection(pixel_values)
    _check_count(len(embeddings), len(tokens))
    tokens = tokens + embeddings.to(tokens.dtype)
    parts = []
    for image in tokens.split(image_grid_hw.prod(1).tolist()):
        parts += [self.cls_register_token, image]
    return torch.cat(parts)[None]


def hunyuan_forward(self: Any, pixel_values: Tensor, grid_thw: Any) -> Tensor:
    """Modifications: the position embeddings of all images and frames at once."""
    key = HUNYUAN, "forward"
    mode = self.config.interpolate_mode
    edge = self.position_edge
    embeddings = _resampled(
        key,
        self,
        pixel_values,
        grid_thw,
        table_at=(self.position_embedding, "weight"),
        # Without the class token's row.
        as_table=lambda weight: weight[1:].reshape(edge, edge, -1).float(),
        reason=None if mode in INTERPOLATIONS else f"a table resized by {mode}",
        mode=mode,
        antialias=False,
    )
    if embeddings is None:
        return original(key)(self, pixel_values, grid_thw)
    images = pixel_values.reshape(-1, self.config.num_channels, self.patch_size, self.patch_size)
    tokens = _project(self, images).flatten(1)
    if len(tokens) != 1:  # one token is for all positions
        _check_count(len(embeddings), len(tokens))
    return (tokens + embeddings.to(tokens.dtype))[None]


def _resampled(
    key: Key,
    module: Any,
    pixel_values: Tensor,
    sizes: Any,
    *,
    table_at: tuple[Any, str],
    as_table: Callable[[Tensor], Tensor],
    reason: str | None = None,
    **options: Any,
) -> Tensor | None:
    """The position embeddings as chosen; None where the library's own code has to run. Counted.

    Args:
        key: of the replaced method, which ``module`` has.
        pixel_values: the method's first argument.
        sizes: as ``functional.resample_pos_embeds`` takes them, and ``options``.
        table_at: a module, and the name of its table.
        as_table: gives that table the shape (H0, W0, C).
        reason: why the library's own code has to run, if the caller knows.
    """
    decision = choose(LIBRARY, key, module, pixel_values, tables_at=table_at, reason=reason)
    embeddings = None
    if decision.strategy != "stock":
        options["strategy"] = decision.strategy
        table = as_table(decision.tables[0])
        # Packed sizes in a tensor have to be read on the host: a graph breaks there, as in
        # transformers.
        is_packed_tensor = "length" not in options and isinstance(sizes, Tensor)
        if is_packed_tensor and torch.compiler.is_dynamo_compiling():
            embeddings = _outside_graphs(table, sizes, **options)
        elif decision.context != "device":
            embeddings = resample_pos_embeds(table, sizes, **options)
        else:
            try:
                embeddings = resample_pos_embeds(table, sizes, **options)
            except NotImplementedError as error:
                reason = lacks_operator(pixel_values.device, error)
                decision = Decision("stock", decision.settings, reason=reason)
    count(LIBRARY, key, decision)
    return embeddings


def _project(embeddings: Any, pixel_values: Tensor) -> Tensor:
    return embeddings.patch_embedding(pixel_values.to(embeddings.patch_embedding.weight.dtype))


# ``torch.compiler.disable`` imports the compiler at once, this one where it is called.
_outside_graphs = torch._disable_dynamo(resample_pos_embeds)


def _check_count(cells: int, tokens: int) -> None:
    """Raise a ValueError if the sizes name another number of tokens than there are."""
    if cells != tokens:
        raise ValueError(f"the grids have {cells} patches together; pixel_values has {tokens}")


def _replacement(
    function: Callable[..., Tensor], *, reads: str, skips: str, is_exported: bool
) -> Replacement:
    """The entry of a tower, whose own code calls its method ``skips``, which ours does not."""
    return Replacement(
        component="pos_embed",
        function=function,
        strategies=AS_INTERPOLATE,
        attributes=reads,
        skips=(Calls.own(skips),),
        not_exported=None if is_exported else "a packed batch in an exported graph",
    )


REPLACEMENTS = {
    (SIGLIP2, "forward"): _replacement(
        siglip2_forward,
        reads="patch_embedding position_embedding position_embedding_size "
        "resize_positional_embeddings",
        skips="resize_positional_embeddings",
        is_exported=True,
    ),
    (COSMOS3, "forward"): _replacement(
        cosmos3_forward,
        reads="config patch_embedding position_embedding position_embedding_size "
        "resize_positional_embeddings",
        skips="resize_positional_embeddings",
        is_exported=False,
    ),
    (RADIO, "_embed_packed_patches"): _replacement(
        radio_embed_packed_patches,
        reads="_interpolate_position_embedding cls_register_token patch_projection",
        skips="_interpolate_position_embedding",
        is_exported=False,
    ),
    (HUNYUAN, "forward"): _replacement(
        hunyuan_forward,
        reads="config interpolate_pos_encoding patch_embedding patch_size",
        skips="interpolate_pos_encoding",
        is_exported=False,
    ),
}

LIBRARY = Library(
    name="transformers",
    oldest=(5, 21, 0),
    newest=(5, 24, 0),
    model_classes=(
        "Siglip2VisionEmbeddings",
        "Cosmos3EdgeVisionEmbeddings",
        "RadioPatchEmbeddings",
        "HunYuanVLVisionPatchEmbed",
    ),
    example="transformers.Siglip2VisionModel",
    replacements=REPLACEMENTS,
    copied_methods={
        (SIGLIP2, "resize_positional_embeddings"): "LongTensor Tensor arange cat div float32",
        (COSMOS3, "resize_positional_embeddings"): "LongTensor Tensor cat interpolate",
        (RADIO, "_interpolate_position_embedding"): "max_cols max_rows position_embedding",
        (HUNYUAN, "interpolate_pos_encoding"): "config embed_dim position_edge position_embedding",
    },
)
