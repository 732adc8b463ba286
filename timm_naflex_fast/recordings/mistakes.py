"""The mistakes that people make when they write SigLIP-2's image tower anew, as one list.

A reference is run with one of them at a time. What it gives then is kept beside the recording, so a
port in any language that makes the same mistake has the same numbers. To add a mistake is to add one
entry to ``MISTAKES``. How a table is resampled is a list of its own, ``conventions.py``.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ..attributes import temporarily
from .conventions import Convention
from .format import Array, Stages

TRAINED = Convention("bilinear", None)  # how SigLIP-2's table was resampled
MEAN_AND_STD = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
}
BRIGHTNESS = (0.299, 0.587, 0.114)


class Mistake(NamedTuple):
    """One mistake: a step of the tower that gives something else.

    Attributes:
        name: in names of arrays.
        words: what it is.
        where: which step. "image": ``change`` makes another image (H, W, 3), from -1 to 1, of a
            :class:`Picture`. "patches": other patches (h, w, p, p, 3), in rows of tokens and of
            pixels; "kernel": the same, but the pixels that a port writes stay right. "position":
            what is added to the patch embedding, (h * w, C), of the table (H0, W0, C), h and w.
            Anything else is a regular expression for names of timm's modules, which give what
            ``change(module, run, x, mask)`` gives. ``run`` is the module as it was, to which
            arguments of its own can be given; ``mask`` that of attention.
        change: what is done there.
        padding: empty for a mistake that shows without padding too. Else tokens are padded as
            "timm" does; as "transformers" does, where they hold the first position and attend to
            valid tokens alone; or as timm does, to "twice" the most patches.
    """

    name: str
    words: str
    where: str
    change: Callable[..., Any]
    padding: str = ""


class Picture(NamedTuple):
    """What mistakes before the patch embedding start from."""

    image: Any  # PIL, RGB
    patch_size: int
    max_patches: int
    filter: str  # of the reference
    stages: Stages  # the reference's

    def pixels(self) -> Array:
        """The reference's pixels as one image (H, W, 3)."""
        h, w = map(int, self.stages["grid"])
        size = self.patch_size
        patches = self.stages["pixels"].reshape(h, w, size, size, 3)
        return patches.swapaxes(1, 2).reshape(h * size, w * size, 3)

    def size(self) -> tuple[int, int]:
        """Height and width to which the reference resized the picture."""
        h, w = map(int, self.stages["grid"])
        return h * self.patch_size, w * self.patch_size


def read(mistake: Mistake, picture: Picture) -> Stages:
    """The grid and the pixels of a picture that is read with a mistake."""
    image = picture.pixels()
    if mistake.where == "image":
        image = mistake.change(picture)
    size = picture.patch_size
    h, w = image.shape[0] // size, image.shape[1] // size
    patches = image.reshape(h, size, w, size, 3).swapaxes(1, 2)  # (h, w, p, p, 3)
    if mistake.where != "image":
        patches = mistake.change(patches)
    grid = np.array(patches.shape[:2], np.int32)
    return {"grid": grid, "pixels": np.float32(patches.reshape(h * w, -1))}


@contextmanager
def making(mistake: Mistake, model: Any) -> Iterator[None]:
    """Inside, a timm NaFlexVit makes a mistake of the tower."""
    with ExitStack() as changes:
        if mistake.padding == "transformers":
            changes.enter_context(_padded_as_in_transformers(model))
        for name, module in model.named_modules():
            if re.fullmatch(mistake.where, name):
                forward = _mistaken(mistake.change, module)
                changes.enter_context(temporarily(module, {"forward": forward}))
        yield


def _mistaken(change: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """What a module computes with a mistake."""
    forward = module.forward

    def mistaken(x: Any, **given: Any) -> Any:
        return change(module, partial(forward, **given), x, given.get("attn_mask"))

    return mistaken


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
        with temporarily(model, {"use_key_only_attn_mask": True}):
            yield


# Images ---------------------------------------------------------------------------------------


def _resize_by_pillow(image: Any, size: tuple[int, int], filter_name: str) -> Array:
    """An image (H, W, 3) of this height and width, from -1 to 1."""
    from PIL.Image import Resampling

    height, width = size
    resized = image.resize((width, height), Resampling[filter_name.upper()])
    return np.asarray(resized, np.float32) / 255 * 2 - 1


def _by_pillow(filter_name: str) -> Callable[[Picture], Array]:
    """Another filter of Pillow's resize."""
    return lambda picture: _resize_by_pillow(picture.image, picture.size(), filter_name)


def _resize_by_torch(numbers: Any, size: tuple[int, int], **options: Any) -> Array:
    """Numbers (H, W, C) resized by PyTorch to (h, w, C): nothing is rounded, nothing cut at white."""
    channels = torch.from_numpy(np.array(numbers, np.float32)).permute(2, 0, 1)[None]
    return F.interpolate(channels, size, **options)[0].permute(1, 2, 0).numpy()


def _by_torch(**options: Any) -> Callable[[Picture], Array]:
    """A resize of floating point numbers, with these options of ``F.interpolate``."""

    def change(picture: Picture) -> Array:
        return _resize_by_torch(picture.image, picture.size(), **options) / 255 * 2 - 1

    return change


def _squeezed(picture: Picture) -> Array:
    """Resized to a square, whatever the picture's shape."""
    side = int(picture.max_patches**0.5) * picture.patch_size
    return _resize_by_pillow(picture.image, (side, side), picture.filter)


def _normalized_as(name: str, colours: Array) -> Array:
    mean, std = MEAN_AND_STD[name]
    return ((colours + 1) / 2 - mean) / std


def _gray(picture: Picture) -> Array:
    colours = picture.pixels()
    return np.broadcast_to((colours @ BRIGHTNESS)[..., None], colours.shape)


def _channels_first(patches: Array) -> Array:
    """The numbers of each patch as if they were in the order (channel, y, x)."""
    h, w, *patch, colours = patches.shape
    return patches.reshape(h, w, colours, *patch)


# The position embedding -----------------------------------------------------------------------


def convention_tokens(convention: Convention, table: Array, h: int, w: int) -> Array:
    """The tokens (h * w, C) of one grid under a convention."""
    return convention.tokens(np.asarray(table, np.float64), [(1, h, w)])


def _follows(**settings: Any) -> Callable[[Array, int, int], Array]:
    """Another convention of the resize: in what it differs from the right one."""
    return partial(convention_tokens, TRAINED._replace(**settings))


def _first_rows(table: Array, h: int, w: int) -> Array:
    rows = table.reshape(-1, table.shape[2])
    return np.resize(rows[: h * w], (h * w, table.shape[2]))


def _corner(table: Array, h: int, w: int) -> Array:
    rows = np.minimum(np.arange(h), table.shape[0] - 1)
    columns = np.minimum(np.arange(w), table.shape[1] - 1)
    return table[np.ix_(rows, columns)].reshape(h * w, -1)


def _to_bfloat16(numbers: Array) -> Array:
    return torch.from_numpy(np.array(numbers, np.float32)).bfloat16().double().numpy()


def _product_in_bfloat16(table: Array, h: int, w: int) -> Array:
    """One product of weights and table, as in transformers, under autocast."""
    cells = table.reshape(-1, table.shape[2])  # (H0 * W0, C)
    each_cell = np.eye(len(cells)).reshape(*table.shape[:2], -1)  # (H0, W0, H0 * W0)
    weights = convention_tokens(TRAINED, each_cell, h, w)  # (h * w, H0 * W0)
    return _to_bfloat16(_to_bfloat16(weights) @ _to_bfloat16(cells))


def _table_by_torch(**options: Any) -> Callable[[Array, int, int], Array]:
    """The table resized with these options of ``F.interpolate``."""

    def change(table: Array, h: int, w: int) -> Array:
        return _resize_by_torch(table, (h, w), **options).reshape(h * w, -1)

    return change


def _table_by_lanczos(table: Array, h: int, w: int) -> Array:
    """Each channel resized by Pillow, as jax.image's lanczos3 resizes."""
    from PIL import Image

    channels = []
    for channel in np.moveaxis(np.asarray(table, np.float32), 2, 0):
        image = Image.fromarray(channel).resize((w, h), Image.Resampling.LANCZOS)
        channels.append(np.asarray(image, np.float64).reshape(h * w))
    return np.stack(channels, 1)


# Modules --------------------------------------------------------------------------------------


def _instead(function: Callable[[Any], Any]) -> Callable[..., Any]:
    """A function of the input, in place of what the module computes."""
    return lambda module, run, x, mask: function(x)


_left_out = _instead(lambda x: x)
_zero = _instead(torch.zeros_like)
_quick_gelu = _instead(lambda x: x * torch.sigmoid(1.702 * x))


def _having(**attributes: Any) -> Callable[..., Any]:
    """The module with other attributes."""

    def change(module: Any, run: Any, x: Any, mask: Any) -> Any:
        with temporarily(module, attributes):
            return run(x)

    return change


def _heads(count: Callable[[int], int]) -> Callable[..., Any]:
    """Attention with another number of heads."""

    def change(attention: Any, run: Any, x: Any, mask: Any) -> Any:
        heads = count(attention.num_heads)
        size = attention.num_heads * attention.head_dim // heads
        other = _having(num_heads=heads, head_dim=size, scale=size**-0.5)
        return other(attention, run, x, mask)

    return change


def _query_times(axis: int, power: float) -> Callable[..., Any]:
    """Queries (B, heads, N, size) times a power of the number of heads, or of a head's size."""

    def change(norm: Any, run: Any, x: Any, mask: Any) -> Any:
        return run(x) * x.shape[axis] ** power

    return change


_not_scaled = _query_times(3, 0.5)
_scaled_twice = _query_times(3, -0.5)


def _parts(*order: int) -> Callable[..., Any]:
    """Query, key and value, of which a layer gives as many as this, in another order."""

    def change(layer: Any, run: Any, x: Any, mask: Any) -> Any:
        parts = run(x).chunk(len(order), -1)
        return torch.cat([parts[place] for place in order], -1)

    return change


def _interleaved(attention: Any, run: Any, x: Any, mask: Any) -> Any:
    """Rows by head, each with its query, key and value, read as if they were three thirds."""
    by_head = attention.qkv(x).unflatten(-1, (attention.num_heads, 3, -1))
    thirds = by_head.transpose(-3, -2).flatten(-3)
    with temporarily(attention.qkv, {"forward": lambda _: thirds}):
        return run(x)


def _no_bias(layer: Any, run: Any, x: Any, mask: Any) -> Any:
    return F.linear(x, layer.weight)


def _no_bias_on(third: int) -> Callable[..., Any]:
    """No bias on the query, the key or the value."""

    def change(layer: Any, run: Any, x: Any, mask: Any) -> Any:
        bias = layer.bias.clone()
        bias.chunk(3)[third].zero_()
        return F.linear(x, layer.weight, bias)

    return change


def _rms_norm(norm: Any, run: Any, x: Any, mask: Any) -> Any:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)


def _not_masked(module: Any, run: Any, x: Any, mask: Any) -> Any:
    return run(x, attn_mask=None)


def _causal(attention: Any, run: Any, x: Any, mask: Any) -> Any:
    length = x.shape[1]
    return run(x, attn_mask=torch.ones(length, length, dtype=torch.bool).tril())


def _post_norm(block: Any, run: Any, x: Any, mask: Any) -> Any:
    x = block.norm1(x + block.attn(x, attn_mask=mask))
    return block.norm2(x + block.mlp(x))


def _swapped_norms(block: Any, run: Any, x: Any, mask: Any) -> Any:
    with temporarily(block, {"norm1": block.norm2, "norm2": block.norm1}):
        return run(x)


def _no_attention_residual(block: Any, run: Any, x: Any, mask: Any) -> Any:
    x = block.attn(block.norm1(x), attn_mask=mask)
    return x + block.mlp(block.norm2(x))


def _no_mlp_residual(block: Any, run: Any, x: Any, mask: Any) -> Any:
    x = x + block.attn(block.norm1(x), attn_mask=mask)
    return block.mlp(block.norm2(x))


def _parallel(block: Any, run: Any, x: Any, mask: Any) -> Any:
    return x + block.attn(block.norm1(x), attn_mask=mask) + block.mlp(block.norm2(x))


def _reversed_blocks(model: Any, run: Any, x: Any, mask: Any) -> Any:
    # Each stage keeps its place: "block_0" is what the first block that runs gives.
    last_to_first = [block.forward for block in reversed(model.blocks)]
    with ExitStack() as changes:
        for block, forward in zip(model.blocks, last_to_first):
            changes.enter_context(temporarily(block, {"forward": forward}))
        return run(x)


def _valid(x: Any, mask: Any) -> Any:
    """The tokens of one picture that are no padding, (1, h * w, C)."""
    return x[:, mask[0, 0, 0] == 0]


def _no_pooling_residual(head: Any, run: Any, x: Any, mask: Any) -> Any:
    with temporarily(head, {"mlp": None}):
        attended = run(x)
    return head.mlp(head.norm(attended))


# The list -------------------------------------------------------------------------------------

BLOCK = r"blocks\.\d+"
ATTENTION = r"blocks\.\d+\.attn"
QKV = r"blocks\.\d+\.attn\.qkv"
QUERY = r"blocks\.\d+\.attn\.q_norm"
ACTIVATION = r".*\.mlp\.act"
NORM = r"blocks\.\d+\.norm[12]|norm|attn_pool\.norm"
HEAD = "attn_pool"

MISTAKES = [
    Mistake(
        "grid_width_first",
        "the grid is written as (columns, rows)",
        "patches",
        lambda patches: patches.reshape(patches.shape[1], -1, *patches.shape[2:]),
    ),
    Mistake("squeezed", "the picture is squeezed to a square", "image", _squeezed),
    Mistake(
        "bgr",
        "colours in the order blue, green, red",
        "image",
        lambda picture: picture.pixels()[..., ::-1],
    ),
    Mistake(
        "from_0_to_1",
        "pixels from 0 to 1, not from -1 to 1",
        "image",
        lambda picture: (picture.pixels() + 1) / 2,
    ),
    Mistake(
        "from_0_to_255",
        "pixels from 0 to 255, not from -1 to 1",
        "image",
        lambda picture: (picture.pixels() + 1) * 127.5,
    ),
    Mistake(
        "imagenet",
        "ImageNet's mean and standard deviation",
        "image",
        lambda picture: _normalized_as("imagenet", picture.pixels()),
    ),
    Mistake(
        "imagenet_bgr",
        "ImageNet's mean and standard deviation, on blue, green, red",
        "image",
        lambda picture: _normalized_as("imagenet", picture.pixels()[..., ::-1]),
    ),
    Mistake(
        "clip",
        "CLIP's mean and standard deviation",
        "image",
        lambda picture: _normalized_as("clip", picture.pixels()),
    ),
    Mistake("gray", "all three colours are the brightness", "image", _gray),
    Mistake("nearest", "pictures resized by nearest", "image", _by_pillow("nearest")),
    Mistake("bilinear", "pictures resized by bilinear", "image", _by_pillow("bilinear")),
    Mistake(
        "bilinear_not_antialiased",
        "pictures resized by bilinear without antialiasing",
        "image",
        _by_torch(mode="bilinear"),
    ),
    Mistake("bicubic", "pictures resized by bicubic", "image", _by_pillow("bicubic")),
    Mistake(
        "bicubic_not_antialiased",
        "pictures resized by bicubic without antialiasing",
        "image",
        _by_torch(mode="bicubic"),
    ),
    Mistake(
        "bicubic_float",
        "pictures resized by bicubic in floating point, not cut at black and white",
        "image",
        _by_torch(mode="bicubic", antialias=True),
    ),
    Mistake(
        "nearest_floor",
        "pictures resized by nearest, cell floor(i * scale)",
        "image",
        _by_torch(mode="nearest"),
    ),
    Mistake("lanczos", "pictures resized by lanczos", "image", _by_pillow("lanczos")),
    Mistake("box", "pictures resized by box (area)", "image", _by_pillow("box")),
    Mistake("hamming", "pictures resized by hamming", "image", _by_pillow("hamming")),
    Mistake(
        "upside_down",
        "EXIF ignored: the picture stands on its head",
        "image",
        lambda picture: np.rot90(picture.pixels(), 2),
    ),
    Mistake(
        "mirrored",
        "the picture is mirrored: left and right",
        "image",
        lambda picture: picture.pixels()[:, ::-1],
    ),
    Mistake(
        "flipped",
        "the picture is mirrored: top and bottom",
        "image",
        lambda picture: picture.pixels()[::-1],
    ),
    Mistake(
        "turned_left",
        "EXIF ignored: the picture is turned to the left",
        "image",
        lambda picture: np.rot90(picture.pixels(), 1),
    ),
    Mistake(
        "turned_right",
        "EXIF ignored: the picture is turned to the right",
        "image",
        lambda picture: np.rot90(picture.pixels(), 3),
    ),
    Mistake(
        "patch_cyx",
        "a patch in the order (channel, y, x), not (y, x, channel)",
        "patches",
        lambda patches: patches.transpose(0, 1, 4, 2, 3),
    ),
    Mistake(
        "patch_xyc",
        "a patch in the order (x, y, channel), not (y, x, channel)",
        "patches",
        lambda patches: patches.transpose(0, 1, 3, 2, 4),
    ),
    Mistake(
        "patch_cxy",
        "a patch in the order (channel, x, y), not (y, x, channel)",
        "patches",
        lambda patches: patches.transpose(0, 1, 4, 3, 2),
    ),
    Mistake(
        "tokens_by_column",
        "tokens column by column",
        "patches",
        lambda patches: patches.swapaxes(0, 1).reshape(patches.shape),
    ),
    Mistake(
        "kernel_cyx",
        "the patch kernel is laid out in the order (channel, y, x)",
        "kernel",
        lambda patches: _channels_first(patches).transpose(0, 1, 3, 4, 2),
    ),
    Mistake(
        "kernel_xyc",
        "the patch kernel is laid out in the order (x, y, channel)",
        "kernel",
        lambda patches: patches.transpose(0, 1, 3, 2, 4),
    ),
    Mistake(
        "kernel_cxy",
        "the patch kernel is laid out in the order (channel, x, y)",
        "kernel",
        lambda patches: _channels_first(patches).transpose(0, 1, 4, 3, 2),
    ),
    Mistake(
        "kernel_bgr",
        "the patch kernel's colours are in the order blue, green, red",
        "kernel",
        lambda patches: patches[..., ::-1],
    ),
    Mistake(
        "kernel_mirrored",
        "the patch kernel is mirrored: left and right",
        "kernel",
        lambda patches: patches[..., ::-1, :],
    ),
    Mistake(
        "kernel_flipped",
        "the patch kernel is mirrored: top and bottom",
        "kernel",
        lambda patches: patches[:, :, ::-1],
    ),
    Mistake(
        "position_left_out",
        "no position embedding is added",
        "position",
        lambda table, h, w: np.zeros((h * w, table.shape[2])),
    ),
    Mistake(
        "position_twice",
        "the position embedding is added twice",
        "position",
        lambda table, h, w: convention_tokens(TRAINED, 2 * table, h, w),
    ),
    Mistake(
        "table_first_rows",
        "the table is not resized: its first h * w rows are added",
        "position",
        _first_rows,
    ),
    Mistake(
        "table_corner",
        "the table is not resized: its top left corner is added",
        "position",
        _corner,
    ),
    Mistake(
        "table_transposed", "the table is read transposed", "position", _follows(transposed="table")
    ),
    Mistake(
        "size_transposed",
        "the table is resized to (w, h), not (h, w)",
        "position",
        _follows(transposed="size"),
    ),
    Mistake(
        "positions_by_column",
        "position embeddings are added column by column",
        "position",
        _follows(transposed="order"),
    ),
    Mistake(
        "table_in_bfloat16",
        "the table is read in bfloat16",
        "position",
        lambda table, h, w: convention_tokens(TRAINED, _to_bfloat16(table), h, w),
    ),
    Mistake(
        "product_in_bfloat16",
        "the table is resized by one product in bfloat16, perhaps under autocast",
        "position",
        _product_in_bfloat16,
    ),
    Mistake(
        "table_bicubic",
        "the table is resized by bicubic",
        "position",
        _follows(mode="bicubic", cubic_coefficient=-0.5),
    ),
    Mistake(
        "table_not_antialiased",
        "the table is resized by bilinear without antialiasing",
        "position",
        _follows(antialias=False, outside="border"),
    ),
    Mistake(
        "table_bicubic_not_antialiased",
        "the table is resized by bicubic without antialiasing",
        "position",
        _follows(mode="bicubic", cubic_coefficient=-0.75, antialias=False, outside="border"),
    ),
    Mistake(
        "table_area",
        "the table is resized by area (adaptive average pooling)",
        "position",
        _table_by_torch(mode="area"),
    ),
    Mistake("table_lanczos", "the table is resized by lanczos", "position", _table_by_lanczos),
    Mistake(
        "interpolate_unbatched",
        "F.interpolate of an unbatched table is wrong for a grid of one column: give it a batch axis of its own",
        "position",
        _table_by_torch(mode="bilinear", antialias=True),
    ),
    Mistake(
        "table_align_corners",
        "the table is resized with aligned corners",
        "position",
        _table_by_torch(mode="bilinear", align_corners=True),
    ),
    Mistake(
        "padding_not_masked", "padding is not masked in the blocks", ATTENTION, _not_masked, "timm"
    ),
    Mistake(
        "padding_not_masked_in_transformers",
        "padding is not masked in the blocks",
        ATTENTION,
        _not_masked,
        "transformers",
    ),
    Mistake(
        "exact_gelu", "the exact GELU, not its approximation by tanh", ACTIVATION, _instead(F.gelu)
    ),
    Mistake(
        "tanh_gelu",
        "GELU's approximation by tanh, not the exact one",
        ACTIVATION,
        _instead(nn.GELU("tanh")),
    ),
    Mistake("quick_gelu", "quick GELU, x * sigmoid(1.702 x)", ACTIVATION, _quick_gelu),
    Mistake("relu", "ReLU in place of GELU", ACTIVATION, _instead(F.relu)),
    Mistake("silu", "SiLU in place of GELU", ACTIVATION, _instead(F.silu)),
    Mistake("eps_1e-5", "LayerNorm's eps is 1e-5, not 1e-6", NORM, _having(eps=1e-5)),
    Mistake("eps_1e-12", "LayerNorm's eps is 1e-12, not 1e-6", NORM, _having(eps=1e-12)),
    Mistake(
        "heads_halved", "half the number of heads", ATTENTION, _heads(lambda heads: heads // 2)
    ),
    Mistake(
        "heads_doubled", "twice the number of heads", ATTENTION, _heads(lambda heads: heads * 2)
    ),
    Mistake("no_scale", "attention is not scaled by 1 / sqrt(head size)", QUERY, _not_scaled),
    Mistake("scale_twice", "attention is scaled twice", QUERY, _scaled_twice),
    Mistake(
        "scale_of_width",
        "attention is scaled by 1 / sqrt(width), not 1 / sqrt(head size)",
        QUERY,
        _query_times(1, -0.5),
    ),
    Mistake("order_k_q_v", "query and key are exchanged", QKV, _parts(1, 0, 2)),
    Mistake("order_v_k_q", "query and value are exchanged", QKV, _parts(2, 1, 0)),
    Mistake("order_q_v_k", "key and value are exchanged", QKV, _parts(0, 2, 1)),
    Mistake("order_k_v_q", "query, key, value are read as key, value, query", QKV, _parts(1, 2, 0)),
    Mistake("order_v_q_k", "query, key, value are read as value, query, key", QKV, _parts(2, 0, 1)),
    Mistake(
        "interleaved", "query, key, value are read as interleaved by head", ATTENTION, _interleaved
    ),
    Mistake("no_qkv_bias", "no bias on query, key and value", QKV, _no_bias),
    Mistake("no_q_bias", "no bias on query", QKV, _no_bias_on(0)),
    Mistake("no_v_bias", "no bias on value", QKV, _no_bias_on(2)),
    Mistake("no_out_bias", "no bias after attention", r"blocks\.\d+\.attn\.proj", _no_bias),
    Mistake("no_fc1_bias", "no bias in the MLP's first layer", r"blocks\.\d+\.mlp\.fc1", _no_bias),
    Mistake("no_fc2_bias", "no bias in the MLP's second layer", r"blocks\.\d+\.mlp\.fc2", _no_bias),
    Mistake("post_norm", "LayerNorm after attention and MLP, not before", BLOCK, _post_norm),
    Mistake("swapped_norms", "the two LayerNorms of a block are exchanged", BLOCK, _swapped_norms),
    Mistake("no_norms", "no LayerNorm in the blocks", r"blocks\.\d+\.norm[12]", _left_out),
    Mistake(
        "no_attention_residual",
        "attention's input is not added to its output",
        BLOCK,
        _no_attention_residual,
    ),
    Mistake(
        "no_mlp_residual", "the MLP's input is not added to its output", BLOCK, _no_mlp_residual
    ),
    Mistake("no_attention", "attention is left out", ATTENTION, _zero),
    Mistake("no_mlp", "the MLP is left out", r"blocks\.\d+\.mlp", _zero),
    Mistake("no_first_norm", "no LayerNorm before attention", r"blocks\.\d+\.norm1", _left_out),
    Mistake("no_second_norm", "no LayerNorm before the MLP", r"blocks\.\d+\.norm2", _left_out),
    Mistake("rms_norm", "RMSNorm in place of LayerNorm", NORM, _rms_norm),
    Mistake("one_head", "one attention head", ATTENTION, _heads(lambda heads: 1)),
    Mistake(
        "no_out_projection",
        "attention's output projection is left out",
        r"blocks\.\d+\.attn\.proj",
        _left_out,
    ),
    Mistake("parallel", "attention and MLP in parallel, not one after the other", BLOCK, _parallel),
    Mistake("causal", "causal attention", ATTENTION, _causal),
    Mistake("blocks_reversed", "the blocks in reverse order", "", _reversed_blocks),
    Mistake(
        "max_pooled",
        "the largest number of the tokens, without attention",
        HEAD,
        lambda head, run, x, mask: _valid(x, mask).amax(1),
    ),
    Mistake(
        "pooling_heads_halved",
        "half the number of heads in the pooling",
        HEAD,
        _heads(lambda heads: heads // 2),
    ),
    Mistake(
        "pooling_heads_doubled",
        "twice the number of heads in the pooling",
        HEAD,
        _heads(lambda heads: heads * 2),
    ),
    Mistake(
        "pooling_scale_twice",
        "the head's attention is scaled twice",
        "attn_pool.q_norm",
        _scaled_twice,
    ),
    Mistake(
        "pooling_exact_gelu",
        "the exact GELU in the head, not its approximation by tanh",
        "attn_pool.mlp.act",
        _instead(F.gelu),
    ),
    Mistake("pooling_quick_gelu", "quick GELU in the head", "attn_pool.mlp.act", _quick_gelu),
    Mistake(
        "pooling_eps_1e-5",
        "the head's LayerNorm has eps 1e-5, not 1e-6",
        "attn_pool.norm",
        _having(eps=1e-5),
    ),
    Mistake(
        "pooling_no_qkv_bias",
        "no bias on the head's query, key and value",
        r"attn_pool\.(q|kv)",
        _no_bias,
    ),
    Mistake("pooling_no_q_bias", "no bias on the head's query", "attn_pool.q", _no_bias),
    Mistake(
        "pooling_no_out_bias", "no bias after the head's attention", "attn_pool.proj", _no_bias
    ),
    Mistake(
        "pooling_no_mlp_bias", "no biases in the head's MLP", r"attn_pool\.mlp\.fc[12]", _no_bias
    ),
    Mistake("no_last_norm", "the last LayerNorm is left out", "norm", _left_out),
    Mistake(
        "mean_pooled",
        "the mean of the tokens, without attention",
        HEAD,
        lambda head, run, x, mask: _valid(x, mask).mean(1),
    ),
    Mistake(
        "mean_of_padding_too",
        "the mean of all tokens, padding too",
        HEAD,
        _instead(lambda x: x.mean(1)),
        "timm",
    ),
    Mistake(
        "mean_of_padding_too_in_transformers",
        "the mean of all tokens, padding too",
        HEAD,
        _instead(lambda x: x.mean(1)),
        "transformers",
    ),
    Mistake("first_token", "the first token, without attention", HEAD, _instead(lambda x: x[:, 0])),
    Mistake(
        "pooling_not_masked", "padding is not masked in the pooling", HEAD, _not_masked, "timm"
    ),
    Mistake(
        "pooling_not_masked_in_transformers",
        "padding is not masked in the pooling",
        HEAD,
        _not_masked,
        "transformers",
    ),
    Mistake(
        "no_pooling_residual",
        "the head's MLP is not added to its input",
        HEAD,
        _no_pooling_residual,
    ),
    Mistake("no_pooling_mlp", "the head's MLP is left out", "attn_pool.mlp", _zero),
    Mistake("no_pooling_norm", "the head's LayerNorm is left out", "attn_pool.norm", _left_out),
    Mistake(
        "probe_not_projected", "the probe is not projected to a query", "attn_pool.q", _left_out
    ),
    Mistake(
        "no_pooling_projection",
        "the head's output projection is left out",
        "attn_pool.proj",
        _left_out,
    ),
    Mistake("pooling_k_v", "key and value of the head are exchanged", "attn_pool.kv", _parts(1, 0)),
    Mistake(
        "pooling_no_scale", "the head's attention is not scaled", "attn_pool.q_norm", _not_scaled
    ),
    Mistake("pooling_one_head", "the head attends with one head", HEAD, _heads(lambda heads: 1)),
    Mistake(
        "normalized",
        "the output is divided by its length",
        HEAD,
        lambda head, run, x, mask: F.normalize(run(x), dim=-1),
    ),
]
"""In the order in which their steps come; those of single blocks are added to them."""


def mistakes_of(model: Any) -> list[Mistake]:
    """Every mistake that is tried on a model: those of the list, and each block left out."""
    found = [*MISTAKES]
    for number in range(len(model.blocks)):
        words = f"block {number} is left out"
        found.append(Mistake(f"block_{number}_left_out", words, rf"blocks\.{number}", _left_out))
    return found
