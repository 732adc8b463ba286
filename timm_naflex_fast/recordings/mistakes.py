"""The mistakes that people make when they write SigLIP-2's image tower anew, as one list.

A reference is run with one of them at a time. What it gives then is kept beside the recording, so a
port in any language that makes the same mistake has the same numbers. To add a mistake is to add one
entry to one of the lists below. How a table is resampled is a list of its own, ``conventions.py``.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ..attributes import temporarily
from .conventions import Convention
from .format import Array, Stages

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


class Mistake(NamedTuple):
    """One mistake."""

    name: str  # in names of arrays
    words: str
    make: Any  # what makes it; each list says what it takes


class Picture(NamedTuple):
    """What mistakes before the tower start from."""

    image: Any  # PIL, RGB
    patch_size: int
    max_patches: int
    filter: str  # of the reference
    stages: Stages  # the reference's


# Pictures -------------------------------------------------------------------------------------


def _patches(image: Any, patch_size: int) -> Array:
    """The pixels of an image whose sides are multiples of the patch size, (h * w, p * p * 3)."""
    pixels = np.asarray(image, np.float32) / 255 * 2 - 1  # (H, W, 3)
    return _cut(pixels, patch_size)


def _cut(pixels: Array, patch_size: int) -> Array:
    """An image (H, W, 3) cut into patches, (h * w, p * p * 3)."""
    h, w = (side // patch_size for side in pixels.shape[:2])
    grid = pixels.reshape(h, patch_size, w, patch_size, 3)
    return grid.transpose(0, 2, 1, 3, 4).reshape(h * w, -1)


def _joined(picture: Picture) -> Array:
    """The reference's pixels as one image (H, W, 3)."""
    h, w = map(int, picture.stages["grid"])
    size = picture.patch_size
    grid = picture.stages["pixels"].reshape(h, w, size, size, 3)
    return grid.transpose(0, 2, 1, 3, 4).reshape(h * size, w * size, 3)


def _resized(filter_name: str) -> Callable[[Picture], Stages]:
    """Another filter of Pillow's resize."""

    def make(picture: Picture) -> Stages:
        from PIL.Image import Resampling

        grid = picture.stages["grid"]
        rows, columns = (int(side) * picture.patch_size for side in grid)
        image = picture.image.resize((columns, rows), Resampling[filter_name.upper()])
        return {"grid": grid, "pixels": _patches(image, picture.patch_size)}

    return make


def _interpolated(filter_name: str, antialias: bool) -> Callable[[Picture], Stages]:
    """A resize of floating point numbers by PyTorch: nothing is rounded, and nothing cut at white."""

    def make(picture: Picture) -> Stages:
        grid = picture.stages["grid"]
        rows, columns = (int(side) * picture.patch_size for side in grid)
        pixels = torch.from_numpy(np.array(picture.image, np.float32)).permute(2, 0, 1)[None]
        resized = F.interpolate(pixels, (rows, columns), mode=filter_name, antialias=antialias)
        return {"grid": grid, "pixels": _patches(resized[0].permute(1, 2, 0), picture.patch_size)}

    return make


def _recoloured(change: Callable[[Array], Array]) -> Callable[[Picture], Stages]:
    """Other colours, from the reference's pixels."""

    def make(picture: Picture) -> Stages:
        pixels = picture.stages["pixels"]
        colours = change(pixels.reshape(len(pixels), -1, 3))  # (tokens, p * p, 3)
        return {
            "grid": picture.stages["grid"],
            "pixels": colours.reshape(pixels.shape).astype(np.float32),
        }

    return make


def _imagenet(colours: Array) -> Array:
    return ((colours + 1) / 2 - IMAGENET_MEAN) / IMAGENET_STD


def _clip(colours: Array) -> Array:
    return ((colours + 1) / 2 - CLIP_MEAN) / CLIP_STD


def _squeezed(picture: Picture) -> Stages:
    """Resized to a square, whatever the picture's shape."""
    from PIL.Image import Resampling

    side = int(picture.max_patches**0.5)
    pixels = side * picture.patch_size
    image = picture.image.resize((pixels, pixels), Resampling[picture.filter.upper()])
    return {"grid": np.array([side, side]), "pixels": _patches(image, picture.patch_size)}


def _turned(turns: int) -> Callable[[Picture], Stages]:
    """The picture as the camera lay."""

    def make(picture: Picture) -> Stages:
        image = np.rot90(_joined(picture), turns)
        grid = picture.stages["grid"]
        return {
            "grid": grid[::-1] if turns % 2 else grid,
            "pixels": np.ascontiguousarray(_cut(image, picture.patch_size)),
        }

    return make


def _mirrored(axis: int) -> Callable[[Picture], Stages]:
    """The picture mirrored: axis 0 upside down, axis 1 left and right."""

    def make(picture: Picture) -> Stages:
        image = np.flip(_joined(picture), axis)
        pixels = np.ascontiguousarray(_cut(image, picture.patch_size))
        return {"grid": picture.stages["grid"], "pixels": pixels}

    return make


def _width_first(picture: Picture) -> Stages:
    return {"grid": picture.stages["grid"][::-1], "pixels": picture.stages["pixels"]}


PICTURES = [
    Mistake("grid_width_first", "the grid is written as (columns, rows)", _width_first),
    Mistake("squeezed", "the picture is squeezed to a square", _squeezed),
    Mistake("bgr", "colours in the order blue, green, red", _recoloured(lambda c: c[..., ::-1])),
    Mistake(
        "from_0_to_1", "pixels from 0 to 1, not from -1 to 1", _recoloured(lambda c: (c + 1) / 2)
    ),
    Mistake(
        "from_0_to_255",
        "pixels from 0 to 255, not from -1 to 1",
        _recoloured(lambda c: (c + 1) * 127.5),
    ),
    Mistake("imagenet", "ImageNet's mean and standard deviation", _recoloured(_imagenet)),
    Mistake(
        "imagenet_bgr",
        "ImageNet's mean and standard deviation, on blue, green, red",
        _recoloured(lambda c: _imagenet(c[..., ::-1])),
    ),
    Mistake("clip", "CLIP's mean and standard deviation", _recoloured(_clip)),
    Mistake(
        "gray",
        "all three colours are the brightness",
        _recoloured(lambda c: np.broadcast_to(c @ np.array([[0.299], [0.587], [0.114]]), c.shape)),
    ),
    Mistake("nearest", "pictures resized by nearest", _resized("nearest")),
    Mistake("bilinear", "pictures resized by bilinear", _resized("bilinear")),
    Mistake(
        "bilinear_not_antialiased",
        "pictures resized by bilinear without antialiasing",
        _interpolated("bilinear", antialias=False),
    ),
    Mistake("bicubic", "pictures resized by bicubic", _resized("bicubic")),
    Mistake(
        "bicubic_not_antialiased",
        "pictures resized by bicubic without antialiasing",
        _interpolated("bicubic", antialias=False),
    ),
    Mistake(
        "bicubic_float",
        "pictures resized by bicubic in floating point, not cut at black and white",
        _interpolated("bicubic", antialias=True),
    ),
    Mistake(
        "nearest_floor",
        "pictures resized by nearest, cell floor(i * scale)",
        _interpolated("nearest", antialias=False),
    ),
    Mistake("lanczos", "pictures resized by lanczos", _resized("lanczos")),
    Mistake("box", "pictures resized by box (area)", _resized("box")),
    Mistake("hamming", "pictures resized by hamming", _resized("hamming")),
    Mistake("upside_down", "EXIF ignored: the picture stands on its head", _turned(2)),
    Mistake("mirrored", "the picture is mirrored: left and right", _mirrored(1)),
    Mistake("flipped", "the picture is mirrored: top and bottom", _mirrored(0)),
    Mistake("turned_left", "EXIF ignored: the picture is turned to the left", _turned(1)),
    Mistake("turned_right", "EXIF ignored: the picture is turned to the right", _turned(3)),
]
"""``make``: from a :class:`Picture` to its grid and pixels."""


# Patches --------------------------------------------------------------------------------------


def _reordered(*axes: int) -> Callable[[Array, Array, int], Array]:
    """The numbers of each patch in another order of (y, x, channel)."""

    def make(pixels: Array, grid: Array, patch_size: int) -> Array:
        patches = pixels.reshape(len(pixels), patch_size, patch_size, 3)
        return patches.transpose(0, *axes).reshape(pixels.shape)

    return make


def _from_order(*axes: int) -> Callable[[Array, Array, int], Array]:
    """The numbers of each patch, which were in another order of (y, x, channel), put right."""
    inverse = [int(place) + 1 for place in np.argsort(axes)]

    def make(pixels: Array, grid: Array, patch_size: int) -> Array:
        sides = (patch_size, patch_size, 3)
        shape = [sides[axis - 1] for axis in axes]
        patches = pixels.reshape(len(pixels), *shape)
        return patches.transpose(0, *inverse).reshape(pixels.shape)

    return make


def _column_by_column(pixels: Array, grid: Array, patch_size: int) -> Array:
    h, w = map(int, grid)
    return pixels.reshape(h, w, -1).transpose(1, 0, 2).reshape(pixels.shape)


PATCHES = [
    Mistake(
        "patch_cyx",
        "a patch in the order (channel, y, x), not (y, x, channel)",
        _reordered(3, 1, 2),
    ),
    Mistake(
        "patch_xyc",
        "a patch in the order (x, y, channel), not (y, x, channel)",
        _reordered(2, 1, 3),
    ),
    Mistake(
        "patch_cxy",
        "a patch in the order (channel, x, y), not (y, x, channel)",
        _reordered(3, 2, 1),
    ),
    Mistake("tokens_by_column", "tokens column by column", _column_by_column),
]
"""``make``: from the reference's pixels, its grid and the patch size to pixels."""


def _flipped_patch(axis: int) -> Callable[[Array, Array, int], Array]:
    def make(pixels: Array, grid: Array, patch_size: int) -> Array:
        patches = pixels.reshape(len(pixels), patch_size, patch_size, 3)
        return np.flip(patches, axis).reshape(pixels.shape)

    return make


# The kernel's numbers in another order give what the pixels in the inverse order give.
KERNELS = [
    Mistake(
        "kernel_cyx",
        "the patch kernel is laid out in the order (channel, y, x)",
        _from_order(3, 1, 2),
    ),
    Mistake(
        "kernel_xyc",
        "the patch kernel is laid out in the order (x, y, channel)",
        _from_order(2, 1, 3),
    ),
    Mistake(
        "kernel_cxy",
        "the patch kernel is laid out in the order (channel, x, y)",
        _from_order(3, 2, 1),
    ),
    Mistake(
        "kernel_bgr",
        "the patch kernel's colours are in the order blue, green, red",
        _flipped_patch(3),
    ),
    Mistake("kernel_mirrored", "the patch kernel is mirrored: left and right", _flipped_patch(2)),
    Mistake("kernel_flipped", "the patch kernel is mirrored: top and bottom", _flipped_patch(1)),
]
"""``make``: as in ``PATCHES``; the pixels themselves stay right."""


# Position embedding ---------------------------------------------------------------------------


def _first_rows(table: Array, h: int, w: int) -> Array:
    """The first h * w rows of the table, which was not resized."""
    rows = table.reshape(-1, table.shape[2])
    return np.resize(rows[: h * w], (h * w, table.shape[2]))


def _cut_corner(table: Array, h: int, w: int) -> Array:
    """The table's own top left corner."""
    rows = np.minimum(np.arange(h), table.shape[0] - 1)
    columns = np.minimum(np.arange(w), table.shape[1] - 1)
    return table[np.ix_(rows, columns)].reshape(h * w, -1)


def bilinear(table: Array, h: int, w: int) -> Array:
    """The tokens (h * w, C) as SigLIP-2's weights were trained with them."""
    return convention_tokens(Convention("bilinear", None), table, h, w)


def convention_tokens(convention: Convention, table: Array, h: int, w: int) -> Array:
    """The tokens (h * w, C) of one grid under a convention."""
    return convention.tokens(np.asarray(table, np.float64), [(1, h, w)])


def _follows(**settings: Any) -> Callable[[Array, int, int], Array]:
    """Another convention of the resize."""
    convention = Convention(**settings)
    return lambda table, h, w: convention_tokens(convention, table, h, w)


def _rounded(numbers: Array) -> Array:
    """To bfloat16."""
    return torch.from_numpy(np.array(numbers, np.float32)).bfloat16().double().numpy()


def _in_bfloat16(table: Array, h: int, w: int) -> Array:
    return bilinear(_rounded(table), h, w)


def _product_in_bfloat16(table: Array, h: int, w: int) -> Array:
    """One product of weights and table, as in transformers, under autocast."""
    cells = table.reshape(-1, table.shape[2])  # (H0 * W0, C)
    each_cell = np.eye(len(cells)).reshape(*table.shape[:2], -1)  # (H0, W0, H0 * W0)
    weights = bilinear(each_cell, h, w)  # (h * w, H0 * W0)
    return _rounded(_rounded(weights) @ _rounded(cells))


def _area(table: Array, h: int, w: int) -> Array:
    cells = torch.from_numpy(np.array(table, np.float64)).permute(2, 0, 1)[None]
    return F.adaptive_avg_pool2d(cells, (h, w))[0].permute(1, 2, 0).reshape(h * w, -1).numpy()


def _lanczos(table: Array, h: int, w: int) -> Array:
    """Each channel resized by Pillow, as jax.image's lanczos3 resizes."""
    from PIL import Image

    channels = []
    for channel in np.moveaxis(np.asarray(table, np.float32), 2, 0):
        image = Image.fromarray(channel).resize((w, h), Image.Resampling.LANCZOS)
        channels.append(np.asarray(image, np.float64).reshape(h * w))
    return np.stack(channels, 1)


def _interpolate_unbatched(table: Array, h: int, w: int) -> Array:
    """``F.interpolate`` of a view: wrong for a grid of one column, by the strides of its axes."""
    cells = torch.from_numpy(np.array(table, np.float32)).permute(2, 0, 1)[None]
    resized = F.interpolate(cells, (h, w), mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).reshape(h * w, -1).double().numpy()


POSITIONS = [
    Mistake(
        "position_left_out",
        "no position embedding is added",
        lambda t, h, w: np.zeros((h * w, t.shape[2])),
    ),
    Mistake(
        "position_twice",
        "the position embedding is added twice",
        lambda t, h, w: 2 * bilinear(t, h, w),
    ),
    Mistake(
        "table_first_rows", "the table is not resized: its first h * w rows are added", _first_rows
    ),
    Mistake("table_corner", "the table is not resized: its top left corner is added", _cut_corner),
    Mistake(
        "table_transposed",
        "the table is read transposed",
        _follows(mode="bilinear", cubic_coefficient=None, transposed="table"),
    ),
    Mistake(
        "size_transposed",
        "the table is resized to (w, h), not (h, w)",
        _follows(mode="bilinear", cubic_coefficient=None, transposed="size"),
    ),
    Mistake(
        "positions_by_column",
        "position embeddings are added column by column",
        _follows(mode="bilinear", cubic_coefficient=None, transposed="order"),
    ),
    Mistake("table_in_bfloat16", "the table is read in bfloat16", _in_bfloat16),
    Mistake(
        "product_in_bfloat16",
        "the table is resized by one product in bfloat16, perhaps under autocast",
        _product_in_bfloat16,
    ),
    Mistake(
        "table_bicubic",
        "the table is resized by bicubic",
        _follows(mode="bicubic", cubic_coefficient=-0.5),
    ),
    Mistake(
        "table_not_antialiased",
        "the table is resized by bilinear without antialiasing",
        _follows(mode="bilinear", cubic_coefficient=None, antialias=False, outside="border"),
    ),
    Mistake(
        "table_bicubic_not_antialiased",
        "the table is resized by bicubic without antialiasing",
        _follows(mode="bicubic", cubic_coefficient=-0.75, antialias=False, outside="border"),
    ),
    Mistake("table_area", "the table is resized by area (adaptive average pooling)", _area),
    Mistake("table_lanczos", "the table is resized by lanczos", _lanczos),
    Mistake(
        "interpolate_unbatched",
        "F.interpolate of an unbatched table is wrong for a grid of one column: give it a batch axis of its own",
        _interpolate_unbatched,
    ),
    Mistake(
        "table_align_corners",
        "the table is resized with aligned corners",
        _follows(
            mode="bilinear",
            cubic_coefficient=None,
            antialias=False,
            outside="border",
            align_corners=True,
            positions="corners",
        ),
    ),
]
"""``make``: from the table (H0, W0, C), h and w to what is added to the patch embedding."""


# The tower ------------------------------------------------------------------------------------


def _set(owner: Any, **attributes: Any) -> Any:
    """A context in which an object has these attributes."""
    return temporarily(owner, attributes)


@contextmanager
def _each(owners: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, each of them is changed."""
    with ExitStack() as changes:
        for owner in owners:
            changes.enter_context(change(owner))
        yield


def _norms(model: Any) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.LayerNorm)]


def _mlps(model: Any) -> list[Any]:
    mlps = [block.mlp for block in model.blocks]
    if model.attn_pool is not None:
        mlps.append(model.attn_pool.mlp)
    return mlps


class _QuickGelu(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(1.702 * x)


def _activation(make: Callable[[], nn.Module]) -> Callable[[Any], Any]:
    """Another activation in each MLP."""
    return lambda model: _each(_mlps(model), lambda mlp: _set(mlp, act=make()))


def _heads(times: float) -> Callable[[Any], Any]:
    """Another number of heads in each block."""

    def change(attention: Any) -> Any:
        heads = int(attention.num_heads * times)
        if not heads or attention.attn_dim % heads:
            raise ValueError("no such number of heads")
        size = attention.attn_dim // heads
        return _set(attention, num_heads=heads, head_dim=size, scale=size**-0.5)

    return lambda model: _each([block.attn for block in model.blocks], change)


@contextmanager
def _rewritten(parameter: Any, change: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, a parameter has other numbers."""
    kept = parameter.data
    parameter.data = change(kept)
    try:
        yield
    finally:
        parameter.data = kept


def _projections(change: Callable[[Any, Any], Any], names: tuple[str, ...]) -> Callable[[Any], Any]:
    """Other numbers in each block's projection to query, key and value."""

    def changed(attention: Any) -> Any:
        parameters = [getattr(attention.qkv, name) for name in names]
        return _each(parameters, lambda one: _rewritten(one, lambda kept: change(kept, attention)))

    return lambda model: _each([block.attn for block in model.blocks], changed)


def _thirds(*order: int) -> Callable[[Any], Any]:
    """Query, key and value in another order."""

    def change(kept: Any, attention: Any) -> Any:
        parts = kept.chunk(3)
        return torch.cat([parts[place] for place in order])

    return _projections(change, ("weight", "bias"))


def _interleaved(kept: Any, attention: Any) -> Any:
    """Rows by head, each with its query, key and value, read as if they were three thirds."""
    return kept.unflatten(0, (attention.num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def _query_times(power: float) -> Callable[[Any], Any]:
    """Queries times a power of the head's size: 0.5 takes the scale off, -0.5 scales twice."""

    def change(kept: Any, attention: Any) -> Any:
        query, *others = kept.chunk(3)
        return torch.cat([query * attention.head_dim**power, *others])

    return _projections(change, ("weight", "bias"))


def _no_bias(*parts: int) -> Callable[[Any], Any]:
    def change(kept: Any, attention: Any) -> Any:
        thirds = list(kept.chunk(3))
        for part in parts:
            thirds[part] = torch.zeros_like(thirds[part])
        return torch.cat(thirds)

    return _projections(change, ("bias",))


def _zero_biases(names: str) -> Callable[[Any], Any]:
    """No bias in these layers of each block."""

    def change(block: Any) -> Any:
        return _rewritten(block.get_submodule(names).bias, torch.zeros_like)

    return lambda model: _each(model.blocks, change)


def _block_forward(forward: Callable[..., Any]) -> Callable[[Any], Any]:
    """Each block computes something else."""

    def change(block: Any) -> Any:
        def replaced(x: Any, attn_mask: Any = None, **more: Any) -> Any:
            return forward(block, x, attn_mask)

        return _set(block, forward=replaced)

    return lambda model: _each(model.blocks, change)


def _post_norm(block: Any, x: Any, mask: Any) -> Any:
    x = block.norm1(x + block.attn(x, attn_mask=mask))
    return block.norm2(x + block.mlp(x))


def _no_attention_residual(block: Any, x: Any, mask: Any) -> Any:
    x = block.attn(block.norm1(x), attn_mask=mask)
    return x + block.mlp(block.norm2(x))


def _no_mlp_residual(block: Any, x: Any, mask: Any) -> Any:
    x = x + block.attn(block.norm1(x), attn_mask=mask)
    return block.mlp(block.norm2(x))


def _parallel(block: Any, x: Any, mask: Any) -> Any:
    return x + block.attn(block.norm1(x), attn_mask=mask) + block.mlp(block.norm2(x))


def _swapped_norms(block: Any, x: Any, mask: Any) -> Any:
    x = x + block.attn(block.norm2(x), attn_mask=mask)
    return x + block.mlp(block.norm1(x))


@contextmanager
def _padded_as_in_transformers(model: Any) -> Iterator[None]:
    """Inside, padded tokens hold the first position too, and attend to valid ones alone."""

    def add(embeds: Any, inputs: Any, given: Any, output: Any) -> Any:
        tokens, *more = output  # (B, N, C)
        # Not by the module itself: what it gives is a stage.
        first = F.linear(inputs[0][:, :1], embeds.proj.weight, embeds.proj.bias)
        padding = ~given["patch_valid"][..., None]  # (B, N, 1)
        return tokens + padding * (tokens[:, :1] - first), *more

    with model.embeds.register_forward_hook(add, with_kwargs=True):
        with _set(model, use_key_only_attn_mask=True):
            yield


def _in_transformers(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same mistake, where padding shows, in a port of transformers' code."""
    return lambda model: _each([_padded_as_in_transformers, change], lambda one: one(model))


def _unmasked(block: Any, x: Any, mask: Any) -> Any:
    x = x + block.attn(block.norm1(x))
    return x + block.mlp(block.norm2(x))


def _no_norms(block: Any, x: Any, mask: Any) -> Any:
    x = x + block.attn(x, attn_mask=mask)
    return x + block.mlp(x)


def _causal(block: Any, x: Any, mask: Any) -> Any:
    length = x.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    x = x + block.attn(block.norm1(x), attn_mask=causal)
    return x + block.mlp(block.norm2(x))


def _no_mlp(block: Any, x: Any, mask: Any) -> Any:
    return x + block.attn(block.norm1(x), attn_mask=mask)


def _no_attention(block: Any, x: Any, mask: Any) -> Any:
    return x + block.mlp(block.norm2(x))


def _no_first_norm(block: Any, x: Any, mask: Any) -> Any:
    x = x + block.attn(x, attn_mask=mask)
    return x + block.mlp(block.norm2(x))


def _no_second_norm(block: Any, x: Any, mask: Any) -> Any:
    x = x + block.attn(block.norm1(x), attn_mask=mask)
    return x + block.mlp(x)


def _rms_norm(norm: Any) -> Any:
    def forward(x: Any) -> Any:
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)

    return _set(norm, forward=forward)


def _one_head(attention: Any) -> Any:
    size = attention.attn_dim
    return _set(attention, num_heads=1, head_dim=size, scale=size**-0.5)


def _left_out(number: int) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        return _set(model.blocks[number], forward=lambda x, **more: x)

    return change


def _reversed_blocks(model: Any) -> Any:
    # Each stage keeps its place: "block_0" is what the first block that runs gives.
    last_to_first = [block.forward for block in reversed(model.blocks)]
    places = zip(model.blocks, last_to_first)
    return _each(places, lambda place: _set(place[0], forward=place[1]))


BLOCKS = [
    Mistake("padding_not_masked", "padding is not masked in the blocks", _block_forward(_unmasked)),
    Mistake(
        "padding_not_masked_in_transformers",
        "padding is not masked in the blocks",
        _in_transformers(_block_forward(_unmasked)),
    ),
    Mistake("exact_gelu", "the exact GELU, not its approximation by tanh", _activation(nn.GELU)),
    Mistake(
        "tanh_gelu",
        "GELU's approximation by tanh, not the exact one",
        _activation(lambda: nn.GELU("tanh")),
    ),
    Mistake("quick_gelu", "quick GELU, x * sigmoid(1.702 x)", _activation(_QuickGelu)),
    Mistake("relu", "ReLU in place of GELU", _activation(nn.ReLU)),
    Mistake("silu", "SiLU in place of GELU", _activation(nn.SiLU)),
    Mistake(
        "eps_1e-5",
        "LayerNorm's eps is 1e-5, not 1e-6",
        lambda m: _each(_norms(m), lambda n: _set(n, eps=1e-5)),
    ),
    Mistake(
        "eps_1e-12",
        "LayerNorm's eps is 1e-12, not 1e-6",
        lambda m: _each(_norms(m), lambda n: _set(n, eps=1e-12)),
    ),
    Mistake("heads_halved", "half the number of heads", _heads(0.5)),
    Mistake("heads_doubled", "twice the number of heads", _heads(2)),
    Mistake("no_scale", "attention is not scaled by 1 / sqrt(head size)", _query_times(0.5)),
    Mistake("scale_twice", "attention is scaled twice", _query_times(-0.5)),
    Mistake(
        "scale_of_width",
        "attention is scaled by 1 / sqrt(width), not 1 / sqrt(head size)",
        _projections(
            lambda k, a: torch.cat([k.chunk(3)[0] * a.num_heads**-0.5, *k.chunk(3)[1:]]),
            ("weight", "bias"),
        ),
    ),
    Mistake("order_k_q_v", "query and key are exchanged", _thirds(1, 0, 2)),
    Mistake("order_v_k_q", "query and value are exchanged", _thirds(2, 1, 0)),
    Mistake("order_q_v_k", "key and value are exchanged", _thirds(0, 2, 1)),
    Mistake("order_k_v_q", "query, key, value are read as key, value, query", _thirds(1, 2, 0)),
    Mistake("order_v_q_k", "query, key, value are read as value, query, key", _thirds(2, 0, 1)),
    Mistake(
        "interleaved",
        "query, key, value are read as interleaved by head",
        _projections(_interleaved, ("weight", "bias")),
    ),
    Mistake("no_qkv_bias", "no bias on query, key and value", _no_bias(0, 1, 2)),
    Mistake("no_q_bias", "no bias on query", _no_bias(0)),
    Mistake("no_v_bias", "no bias on value", _no_bias(2)),
    Mistake("no_out_bias", "no bias after attention", _zero_biases("attn.proj")),
    Mistake("no_fc1_bias", "no bias in the MLP's first layer", _zero_biases("mlp.fc1")),
    Mistake("no_fc2_bias", "no bias in the MLP's second layer", _zero_biases("mlp.fc2")),
    Mistake(
        "post_norm", "LayerNorm after attention and MLP, not before", _block_forward(_post_norm)
    ),
    Mistake(
        "swapped_norms",
        "the two LayerNorms of a block are exchanged",
        _block_forward(_swapped_norms),
    ),
    Mistake("no_norms", "no LayerNorm in the blocks", _block_forward(_no_norms)),
    Mistake(
        "no_attention_residual",
        "attention's input is not added to its output",
        _block_forward(_no_attention_residual),
    ),
    Mistake(
        "no_mlp_residual",
        "the MLP's input is not added to its output",
        _block_forward(_no_mlp_residual),
    ),
    Mistake("no_attention", "attention is left out", _block_forward(_no_attention)),
    Mistake("no_mlp", "the MLP is left out", _block_forward(_no_mlp)),
    Mistake("no_first_norm", "no LayerNorm before attention", _block_forward(_no_first_norm)),
    Mistake("no_second_norm", "no LayerNorm before the MLP", _block_forward(_no_second_norm)),
    Mistake("rms_norm", "RMSNorm in place of LayerNorm", lambda m: _each(_norms(m), _rms_norm)),
    Mistake(
        "one_head", "one attention head", lambda m: _each([b.attn for b in m.blocks], _one_head)
    ),
    Mistake(
        "no_out_projection",
        "attention's output projection is left out",
        lambda m: _each(
            [b.attn.proj for b in m.blocks], lambda one: _set(one, forward=lambda x: x)
        ),
    ),
    Mistake(
        "parallel",
        "attention and MLP in parallel, not one after the other",
        _block_forward(_parallel),
    ),
    Mistake("causal", "causal attention", _block_forward(_causal)),
    Mistake("blocks_reversed", "the blocks in reverse order", _reversed_blocks),
]
"""``make``: from a timm NaFlexVit to a context in which it makes the mistake."""


def blocks_left_out(model: Any) -> list[Mistake]:
    """A mistake for each block: it is left out."""
    return [
        Mistake(f"block_{number}_left_out", f"block {number} is left out", _left_out(number))
        for number in range(len(model.blocks))
    ]


# The head -------------------------------------------------------------------------------------


def _pooling(pool: Callable[..., Any]) -> Callable[[Any], Any]:
    """The head computes something else of the tokens (B, N, C) and its mask."""

    def change(model: Any) -> Any:
        head = model.attn_pool
        attend = head.forward

        def forward(x: Any, attn_mask: Any = None) -> Any:
            return pool(head, attend, x, attn_mask)

        return _set(head, forward=forward)

    return change


def _mean(head: Any, attend: Any, x: Any, mask: Any) -> Any:
    valid = torch.ones(x.shape[:2]) if mask is None else (mask[:, 0, 0] == 0).to(x.dtype)
    return (x * valid[..., None]).sum(1) / valid.sum(1, keepdim=True)


def _mean_of_padding_too(head: Any, attend: Any, x: Any, mask: Any) -> Any:
    return x.mean(1)


def _no_residual(head: Any, attend: Any, x: Any, mask: Any) -> Any:
    before: list[Any] = []
    with head.norm.register_forward_pre_hook(lambda _, inputs: before.append(inputs[0])):
        return attend(x, mask) - before[0][:, 0]


def _attention_alone(head: Any, attend: Any, x: Any, mask: Any) -> Any:
    with _set(head, mlp=None):
        return attend(x, mask)


def _normalized(head: Any, attend: Any, x: Any, mask: Any) -> Any:
    return F.normalize(attend(x, mask), dim=-1)


def _pooling_heads(times: float) -> Callable[[Any], Any]:
    """Another number of heads in the pooling."""

    def change(model: Any) -> Any:
        head = model.attn_pool
        heads = int(head.num_heads * times)
        if not heads or model.embed_dim % heads:
            raise ValueError("no such number of heads")
        size = model.embed_dim // heads
        return _set(head, num_heads=heads, head_dim=size, scale=size**-0.5)

    return change


def _pooling_query(power: float) -> Callable[[Any], Any]:
    """The probe's query times a power of the head's size."""

    def change(model: Any) -> Any:
        head = model.attn_pool
        return _each(
            [head.q.weight, head.q.bias],
            lambda one: _rewritten(one, lambda kept: kept * head.head_dim**power),
        )

    return change


def _pooling_biases(*names: str) -> Callable[[Any], Any]:
    """No bias in these layers of the head."""

    def change(model: Any) -> Any:
        layers = [model.attn_pool.get_submodule(name) for name in names]
        return _each(layers, lambda layer: _rewritten(layer.bias, torch.zeros_like))

    return change


def _largest_of_tokens(head: Any, attend: Any, x: Any, mask: Any) -> Any:
    if mask is not None:
        x = x.masked_fill((mask[:, 0, 0] != 0)[..., None], float("-inf"))
    return x.amax(1)


HEAD = [
    Mistake(
        "max_pooled",
        "the largest number of the tokens, without attention",
        _pooling(_largest_of_tokens),
    ),
    Mistake("pooling_heads_halved", "half the number of heads in the pooling", _pooling_heads(0.5)),
    Mistake("pooling_heads_doubled", "twice the number of heads in the pooling", _pooling_heads(2)),
    Mistake("pooling_scale_twice", "the head's attention is scaled twice", _pooling_query(-0.5)),
    Mistake(
        "pooling_exact_gelu",
        "the exact GELU in the head, not its approximation by tanh",
        lambda m: _set(m.attn_pool.mlp, act=nn.GELU()),
    ),
    Mistake(
        "pooling_quick_gelu",
        "quick GELU in the head",
        lambda m: _set(m.attn_pool.mlp, act=_QuickGelu()),
    ),
    Mistake(
        "pooling_eps_1e-5",
        "the head's LayerNorm has eps 1e-5, not 1e-6",
        lambda m: _set(m.attn_pool.norm, eps=1e-5),
    ),
    Mistake(
        "pooling_no_qkv_bias",
        "no bias on the head's query, key and value",
        _pooling_biases("q", "kv"),
    ),
    Mistake("pooling_no_q_bias", "no bias on the head's query", _pooling_biases("q")),
    Mistake("pooling_no_out_bias", "no bias after the head's attention", _pooling_biases("proj")),
    Mistake(
        "pooling_no_mlp_bias", "no biases in the head's MLP", _pooling_biases("mlp.fc1", "mlp.fc2")
    ),
    Mistake(
        "no_last_norm",
        "the last LayerNorm is left out",
        lambda m: _set(m.norm, forward=lambda x: x),
    ),
    Mistake("mean_pooled", "the mean of the tokens, without attention", _pooling(_mean)),
    Mistake(
        "mean_of_padding_too", "the mean of all tokens, padding too", _pooling(_mean_of_padding_too)
    ),
    Mistake(
        "mean_of_padding_too_in_transformers",
        "the mean of all tokens, padding too",
        _in_transformers(_pooling(_mean_of_padding_too)),
    ),
    Mistake(
        "first_token",
        "the first token, without attention",
        _pooling(lambda h, attend, x, mask: x[:, 0]),
    ),
    Mistake(
        "pooling_not_masked",
        "padding is not masked in the pooling",
        _pooling(lambda h, attend, x, mask: attend(x)),
    ),
    Mistake(
        "pooling_not_masked_in_transformers",
        "padding is not masked in the pooling",
        _in_transformers(_pooling(lambda h, attend, x, mask: attend(x))),
    ),
    Mistake(
        "no_pooling_residual", "the head's MLP is not added to its input", _pooling(_no_residual)
    ),
    Mistake("no_pooling_mlp", "the head's MLP is left out", _pooling(_attention_alone)),
    Mistake(
        "no_pooling_norm",
        "the head's LayerNorm is left out",
        lambda m: _set(m.attn_pool.norm, forward=lambda x: x),
    ),
    Mistake(
        "probe_not_projected",
        "the probe is not projected to a query",
        lambda m: _set(m.attn_pool, q=nn.Identity()),
    ),
    Mistake(
        "no_pooling_projection",
        "the head's output projection is left out",
        lambda m: _set(m.attn_pool, proj=nn.Identity()),
    ),
    Mistake(
        "pooling_k_v",
        "key and value of the head are exchanged",
        lambda m: _each(
            [m.attn_pool.kv.weight, m.attn_pool.kv.bias],
            lambda p: _rewritten(p, lambda kept: torch.cat([*reversed(kept.chunk(2))])),
        ),
    ),
    Mistake("pooling_no_scale", "the head's attention is not scaled", _pooling_query(0.5)),
    Mistake(
        "pooling_one_head",
        "the head attends with one head",
        lambda m: _set(m.attn_pool, num_heads=1, head_dim=m.embed_dim, scale=m.embed_dim**-0.5),
    ),
    Mistake("normalized", "the output is divided by its length", _pooling(_normalized)),
]
"""``make``: as in ``BLOCKS``; ``no_last_norm`` shows before the head."""
