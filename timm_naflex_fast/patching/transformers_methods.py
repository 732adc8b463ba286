"""transformers: the towers that resample a learned table image by image, each with its replacement.

Siglip2 (also LFM2-VL's tower), Cosmos3-Edge, RADIO's packed images and HunYuan-VL. The whole batch
is resampled at once, in float32 at least, and cast once. transformers >= 5.24 computes Siglip2's
batch at once too, by one product with a weight for each cell of the table. Before, it looped, on
CUDA in the table's own dtype, as Cosmos3-Edge still does. For grids (h, 1) such a loop is wrong:
PyTorch's antialiased resize to width 1 misreads the memory layout that it hands over. Ours is
right.

Tests: tests/patching/test_transformers.py.
"""

# The compiler of older torch cannot evaluate the annotations of functions inside functions.
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..functional import resample_pos_embeds
from ..resampling.spec import INTERPOLATIONS
from ..tracing import Context
from .decide import serve
from .library import EXACT_STRATEGIES, Library, Replacement

SIGLIP2 = "transformers.models.siglip2.modeling_siglip2:Siglip2VisionEmbeddings"
COSMOS3 = "transformers.models.cosmos3_edge.modeling_cosmos3_edge:Cosmos3EdgeVisionEmbeddings"
RADIO = "transformers.models.radio.modeling_radio:RadioPatchEmbeddings"
HUNYUAN = "transformers.models.hunyuan_vl.modeling_hunyuan_vl:HunYuanVLVisionPatchEmbed"

_RESIZE = "resize_positional_embeddings"
LIBRARY = Library(
    name="transformers",
    oldest=(5, 21, 0),
    newest=(5, 24, 0),
    modes=("stock", *EXACT_STRATEGIES),
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


class Tower(Replacement):
    """A method (module, pixel_values, sizes) that gives the tokens of a tower: its patches, to which
    the position embeddings are added."""

    component = "pos_embed"
    axes = "thw"  # what stands for an image in the sizes
    is_packed = True  # the images one after the other, without padding
    # The embeddings are cast from float32 to the dtype of the patches; else to that of the table.
    takes_dtype_of_patches = False

    def __init__(self, path: str, name: str, skips: str) -> None:
        super().__init__(LIBRARY, (path, name), EXACT_STRATEGIES, (skips,))

    def weight(self, module: Any) -> Any:
        """The table as the module has it."""
        return module.position_embedding.weight

    def table(self, module: Any, weight: Tensor) -> Tensor:
        """(h0, w0, C), with the library's own error if it cannot be."""
        side = module.position_embedding_size
        return weight.reshape(side, side, -1)

    def options(self, module: Any, pixel_values: Tensor) -> dict[str, Any]:
        """What ``resample_pos_embeds`` is told beside table and sizes."""
        raise NotImplementedError

    def patches(self, module: Any, pixel_values: Tensor) -> Any:
        """The patches, projected."""
        weight = module.patch_embedding.weight
        return module.patch_embedding(pixel_values.to(weight.dtype))

    def tokens(self, module: Any, patches: Tensor, embeddings: Tensor, sizes: Any) -> Tensor | str:
        """The method's result; or in words why the library's own code has to run."""
        return patches + embeddings

    def why_not(self, *arguments: Any) -> str | None:
        """Another mode of the table, or other sizes."""
        module, pixel_values, sizes = arguments
        # HunYuan-VL's mode stands in the model's configuration, and may be any of PyTorch's.
        mode = self.options(module, pixel_values)["mode"]
        if mode not in INTERPOLATIONS:
            return f"a table resized by {mode}"
        if not _are_whole(sizes, len(self.axes)):
            return f"sizes that are not {' and '.join(self.axes)} in whole numbers"
        return None

    def tensors(self, *arguments: Any) -> tuple[Tensor, ...]:
        """The pixels and the table."""
        module, pixel_values, _ = arguments
        return pixel_values, self.weight(module)

    def compute(
        self, strategy: Any, context: Context, tensors: tuple[Tensor, ...], *arguments: Any
    ) -> Tensor | str:
        """The tokens of all images."""
        module, pixel_values, sizes = arguments
        if self.is_packed and context == "export":
            return "a packed batch in an exported graph"
        table = self.table(module, tensors[1])
        patches = self.patches(module, pixel_values)
        if self.takes_dtype_of_patches and patches.dtype != table.dtype:
            # They come in the dtype of their table: a cast of half precision would be a second one.
            table = table.to(torch.promote_types(table.dtype, torch.float32))
        # Packed sizes in a tensor have to be read on the host: a graph breaks there, as in
        # transformers.
        resample = resample_pos_embeds
        is_traced = torch.compiler.is_dynamo_compiling()
        if is_traced and self.is_packed and isinstance(sizes, Tensor):
            resample = _outside_graphs
        options = self.options(module, pixel_values)
        try:
            embeddings = resample(table, sizes, strategy=strategy, **options)
        except ValueError as error:
            return str(error)
        if self.takes_dtype_of_patches:
            embeddings = embeddings.to(patches.dtype)
        return self.tokens(module, patches, embeddings, sizes)


def _are_whole(sizes: Any, axes: int) -> bool:
    """Whether there are so many whole numbers for each image."""
    if not isinstance(sizes, Tensor):
        return all(len(size) == axes for size in sizes)
    if sizes.is_floating_point() or sizes.dtype == torch.bool:
        return False
    return sizes.ndim == 2 and sizes.shape[1] == axes


# ``torch.compiler.disable`` imports the compiler at once, this one where it is called.
_outside_graphs = torch._disable_dynamo(resample_pos_embeds)


class Siglip2(Tower):
    """Padded: an image has as many tokens as there are patches, and the rest the first cell's."""

    axes = "hw"
    is_packed = False

    def options(self, module: Any, pixel_values: Tensor) -> dict[str, Any]:
        """Padding tokens get the first cell."""
        return {"mode": "bilinear", "length": pixel_values.shape[1], "padding": "first"}


class Cosmos3(Tower):
    """The cells in blocks, as the projector merges them."""

    def options(self, module: Any, pixel_values: Tensor) -> dict[str, Any]:
        """Blocks of cells."""
        return {"mode": "bilinear", "merge": module.config.spatial_merge_size}

    def tokens(self, module: Any, patches: Tensor, embeddings: Tensor, sizes: Any) -> Tensor | str:
        """One embedding for each patch."""
        if len(patches) != len(embeddings):
            return "another number of patches than the sizes give"
        return patches + embeddings


class Radio(Tower):
    """The square around a grid is resized; each image comes after its prefix."""

    axes = "hw"
    takes_dtype_of_patches = True

    def weight(self, module: Any) -> Any:
        """(1, h0 * w0, C)."""
        return module.position_embedding

    def table(self, module: Any, weight: Tensor) -> Tensor:
        """(max_rows, max_cols, C)."""
        return weight.reshape(1, module.max_rows, module.max_cols, -1)[0]

    def options(self, module: Any, pixel_values: Tensor) -> dict[str, Any]:
        """The square around a grid."""
        return {"mode": "bilinear", "antialias": False, "ar_preserving": True}

    def patches(self, module: Any, pixel_values: Tensor) -> Any:
        """The patches, projected."""
        return module.patch_projection(pixel_values)

    def tokens(self, module: Any, patches: Tensor, embeddings: Tensor, sizes: Any) -> Tensor | str:
        """Each image after its prefix."""
        if len(patches) != len(embeddings):
            return "another number of patches than the sizes give"
        parts = []
        # The class and register tokens have no place on a grid, so they get no embedding.
        for image in (patches + embeddings).split(sizes.prod(-1).tolist()):
            parts += [module.cls_register_token, image]
        return torch.cat(parts)[None]


class HunYuan(Tower):
    """The table holds a row for the class token before the cells."""

    takes_dtype_of_patches = True

    def table(self, module: Any, weight: Tensor) -> Tensor:
        """Without the class token's row."""
        edge = module.position_edge
        return weight[1:].reshape(1, edge, edge, module.embed_dim)[0]

    def options(self, module: Any, pixel_values: Tensor) -> dict[str, Any]:
        """In the mode of the model's configuration."""
        return {"mode": module.config.interpolate_mode, "antialias": False}

    def patches(self, module: Any, pixel_values: Tensor) -> Any:
        """By a convolution, one patch at a time."""
        shape = module.config.num_channels, module.patch_size, module.patch_size
        return super().patches(module, pixel_values.reshape(-1, *shape)).flatten(1)

    def tokens(self, module: Any, patches: Tensor, embeddings: Tensor, sizes: Any) -> Tensor | str:
        """In one sequence."""
        return (patches + embeddings)[None]


_SIGLIP2 = Siglip2(SIGLIP2, "forward", _RESIZE)
_COSMOS3 = Cosmos3(COSMOS3, "forward", _RESIZE)
_RADIO = Radio(RADIO, "_embed_packed_patches", "_interpolate_position_embedding")
_HUNYUAN = HunYuan(HUNYUAN, "forward", "interpolate_pos_encoding")


@_SIGLIP2
def siglip2_forward(self: Any, pixel_values: Tensor, spatial_shapes: Tensor) -> Any:
    """Modifications: the whole batch at once; padding tokens get the first cell's, as before."""
    return serve(_SIGLIP2, self, pixel_values, spatial_shapes)


@_COSMOS3
def cosmos3_forward(self: Any, pixel_values: Tensor, grid_thw: Tensor) -> Any:
    """Modifications: the position embeddings of all images and frames at once."""
    return serve(_COSMOS3, self, pixel_values, grid_thw)


@_RADIO
def radio_embed_packed_patches(self: Any, pixel_values: Tensor, image_grid_hw: Tensor) -> Any:
    """Modifications: all images at once; then each image after its prefix, as before."""
    return serve(_RADIO, self, pixel_values, image_grid_hw)


@_HUNYUAN
def hunyuan_forward(self: Any, pixel_values: Tensor, grid_thw: Any) -> Any:
    """Modifications: the position embeddings of all images and frames at once."""
    return serve(_HUNYUAN, self, pixel_values, grid_thw)
