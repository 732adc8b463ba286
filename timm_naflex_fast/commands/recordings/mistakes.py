"""The mistakes that people make when they write SigLIP-2's image tower anew, as one list.

A reference is run with one of them at a time. What it gives then is kept beside the recording, so a
port in any language that makes the same mistake has the same numbers. To add a mistake is to add one
entry to ``MISTAKES``. How a table is resampled is a list of its own, ``conventions.py``.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from ...attributes import temporarily
from .conventions import Convention
from .format import Array

TRAINED = Convention("bilinear", None)  # how SigLIP-2's table was resampled
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
BRIGHTNESS = ((0.299,) * 3, (0.587,) * 3, (0.114,) * 3)  # of a pixel, in each colour
Size = tuple[int, int]  # height, width
Change = Callable[..., Any]


class Mistake(NamedTuple):
    """One mistake: a step from a picture to the pooled output that gives something else.

    Attributes:
        where: which step.
        name: in names of arrays.
        words: what it is.
        change: what is done there. It depends on the step what it takes and gives:

            - "size": from the most patches to rows and columns of patches.
            - "resize": from the picture and (H, W) to an image (H, W, 3), from 0 to 255.
            - "image": from one image (H, W, 3) to another, both from -1 to 1.
            - "patches": from patches (h, w, y, x, 3) to others. "kernel": the same, but the pixels
              that a port writes stay right.
            - "position": from the table (H0, W0, C) and (h, w) to what is added to h * w patches.
            - Anything else is a regular expression for names of timm's modules, which give
              ``change(module, run, x, mask)``. ``run`` is what the module computed before, to
              which other arguments can be given; ``mask`` is that of attention.
        padding: empty for a mistake that needs no padding to show. Else how tokens are padded: as
            "timm" does; as "transformers" does, where they hold the first position and attend to
            valid tokens alone; or as timm does, to "twice" the most patches.
    """

    where: str
    name: str
    words: str
    change: Change
    padding: str = ""


@contextmanager
def making(mistake: Mistake, model: Any) -> Iterator[None]:
    """Inside, the modules of a timm NaFlexVit that a mistake names make it."""
    with ExitStack() as changes:
        for name, module in model.named_modules():
            if re.fullmatch(mistake.where, name):
                mistaken = partial(_mistaken, mistake.change, module, module.forward)
                changes.enter_context(temporarily(module, {"forward": mistaken}))
        if mistake.padding == "transformers":
            changes.enter_context(making(PADDED_QUERIES, model))
        yield


def _mistaken(change: Change, module: Any, forward: Change, x: Any, **given: Any) -> Any:
    """What a module computes with a mistake."""
    return change(module, partial(forward, **given), x, given.get("attn_mask"))


# In transformers padded tokens attend to valid ones. In timm they attend to none.
PADDED_QUERIES = Mistake(
    r"blocks\.\d+\.attn",
    "padded_queries",
    "padded tokens attend to valid ones",
    lambda attention, run, x, mask: run(x, attn_mask=mask[:, :, :1]),
)


# Before the blocks ----------------------------------------------------------------------------


def by_pillow(filter_name: str) -> Change:
    """A filter of Pillow's resize, which takes the width first."""
    resample = Image.Resampling[filter_name.upper()]
    return lambda image, size: np.asarray(image.resize(size[::-1], resample), np.float32)


def _by_torch(**options: Any) -> Change:
    """A resize of floating point numbers (H, W, C) with these options of ``F.interpolate``.

    Of an image nothing is rounded, and nothing cut at black and white.
    """

    def change(numbers: Any, size: Size) -> Array:
        channels = torch.from_numpy(np.array(numbers, np.float32)).permute(2, 0, 1)[None]
        return F.interpolate(channels, size, **options)[0].permute(1, 2, 0).numpy()

    return change


def _channels_by_lanczos(table: Array, size: Size) -> Array:
    """Each channel resized by Pillow, as jax.image's lanczos3 resizes."""
    by_lanczos = by_pillow("lanczos")
    channels = np.moveaxis(table.astype(np.float32), 2, 0)
    return np.stack([by_lanczos(Image.fromarray(one), size) for one in channels], 2)


def _normalized(image: Array, mean: Sequence[float], std: Sequence[float]) -> Array:
    return ((image + 1) / 2 - mean) / std


def _channels_first(patches: Array) -> Array:
    """The numbers of each patch as if they were in the order (channel, y, x)."""
    h, w, *sides, colours = patches.shape
    return patches.reshape(h, w, colours, *sides)


def _follows(**settings: Any) -> Change:
    """A convention of the resize: in what it differs from the right one."""
    convention = TRAINED._replace(**settings)
    return lambda table, size: convention.tokens(table, [(1, *size)])


_right = _follows()


def _corner(table: Array, size: Size) -> Array:
    h, w = size
    return table.take(range(h), 0, mode="clip").take(range(w), 1, mode="clip")


def _to_bfloat16(numbers: Array) -> Array:
    return torch.from_numpy(numbers).bfloat16().double().numpy()


def _product_in_bfloat16(table: Array, size: Size) -> Array:
    """One product of weights and table, as in transformers, under autocast."""
    cells = table.reshape(-1, table.shape[2])  # (H0 * W0, C)
    each_cell = np.eye(len(cells)).reshape(*table.shape[:2], -1)  # (H0, W0, H0 * W0)
    weights = _right(each_cell, size)  # (h * w, H0 * W0)
    return _to_bfloat16(_to_bfloat16(weights) @ _to_bfloat16(cells))


# Modules --------------------------------------------------------------------------------------


def _instead(function: Callable[[Any], Any]) -> Change:
    """A function of the input, in place of what the module computes."""
    return lambda module, run, x, mask: function(x)


_left_out = _instead(lambda x: x)
_zero = _instead(torch.zeros_like)
_quick_gelu = _instead(lambda x: x * torch.sigmoid(1.702 * x))


def _having(**attributes: Any) -> Change:
    """The module with other attributes."""

    def change(module: Any, run: Any, x: Any, mask: Any) -> Any:
        with temporarily(module, attributes):
            return run(x)

    return change


def _heads(times: float) -> Change:
    """Attention with another number of heads, one at least."""

    def change(attention: Any, run: Any, x: Any, mask: Any) -> Any:
        heads = max(1, int(attention.num_heads * times))
        size = attention.num_heads * attention.head_dim // heads
        other = _having(num_heads=heads, head_dim=size, scale=size**-0.5)
        return other(attention, run, x, mask)

    return change


def _query_times(axis: int, power: float) -> Change:
    """Queries (B, heads, N, size) times a power of the number of heads, or of a head's size."""
    return lambda norm, run, x, mask: run(x) * x.shape[axis] ** power


_not_scaled = _query_times(3, 0.5)
_scaled_twice = _query_times(3, -0.5)


def _parts(*order: int) -> Change:
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


def _no_bias_on(third: int) -> Change:
    """No bias on the query, the key or the value."""

    def change(layer: Any, run: Any, x: Any, mask: Any) -> Any:
        bias = layer.bias.clone()
        bias.chunk(3)[third].zero_()
        return F.linear(x, layer.weight, bias)

    return change


def _not_masked(module: Any, run: Any, x: Any, mask: Any) -> Any:
    return run(x, attn_mask=None)


def _post_norm(block: Any, run: Any, x: Any, mask: Any) -> Any:
    x = block.norm1(x + block.attn(x, attn_mask=mask))
    return block.norm2(x + block.mlp(x))


def _swapped_norms(block: Any, run: Any, x: Any, mask: Any) -> Any:
    x = x + block.attn(block.norm2(x), attn_mask=mask)
    return x + block.mlp(block.norm1(x))


def _parallel(block: Any, run: Any, x: Any, mask: Any) -> Any:
    attended = block.attn(block.norm1(x), attn_mask=mask)
    return x + attended + block.mlp(block.norm2(x))


def _no_attention_residual(block: Any, run: Any, x: Any, mask: Any) -> Any:
    x = block.attn(block.norm1(x), attn_mask=mask)
    return x + block.mlp(block.norm2(x))


def _no_mlp_residual(block: Any, run: Any, x: Any, mask: Any) -> Any:
    x = x + block.attn(block.norm1(x), attn_mask=mask)
    return block.mlp(block.norm2(x))


def _reversed_blocks(model: Any, run: Any, x: Any, mask: Any) -> Any:
    # Each stage keeps its place: "block_0" is what the first block that runs gives.
    last_to_first = [block.forward for block in reversed(model.blocks)]
    with ExitStack() as changes:
        for block, forward in zip(model.blocks, last_to_first):
            changes.enter_context(temporarily(block, {"forward": forward}))
        return run(x)


def _attended(head: Any, run: Any, x: Any, mask: Any) -> Any:
    """What the MLP of the head adds to."""
    # Without LayerNorm and MLP it is added to itself.
    return _having(norm=nn.Identity(), mlp=nn.Identity())(head, run, x, mask) / 2


def _valid(x: Any, mask: Any) -> Any:
    """The tokens of one picture that are no padding, (1, h * w, C)."""
    return x[:, mask[0, 0, 0] == 0]


# The list -------------------------------------------------------------------------------------

MISTAKES: dict[str, list[tuple[Any, ...]]] = {
    "size": [
        ("squeezed", "the picture is squeezed to a square", lambda most: [int(most**0.5)] * 2),
    ],
    "resize": [
        ("nearest", "pictures resized by nearest", by_pillow("nearest")),
        ("bilinear", "pictures resized by bilinear", by_pillow("bilinear")),
        (
            "bilinear_not_antialiased",
            "pictures resized by bilinear without antialiasing",
            _by_torch(mode="bilinear"),
        ),
        ("bicubic", "pictures resized by bicubic", by_pillow("bicubic")),
        (
            "bicubic_not_antialiased",
            "pictures resized by bicubic without antialiasing",
            _by_torch(mode="bicubic"),
        ),
        (
            "bicubic_float",
            "pictures resized by bicubic in floating point, not cut at black and white",
            _by_torch(mode="bicubic", antialias=True),
        ),
        (
            "nearest_floor",
            "pictures resized by nearest, cell floor(i * scale)",
            _by_torch(mode="nearest"),
        ),
        ("lanczos", "pictures resized by lanczos", by_pillow("lanczos")),
        ("box", "pictures resized by box (area)", by_pillow("box")),
        ("hamming", "pictures resized by hamming", by_pillow("hamming")),
    ],
    "image": [
        ("bgr", "colours in the order blue, green, red", lambda image: image[..., ::-1]),
        ("from_0_to_1", "pixels from 0 to 1, not from -1 to 1", lambda image: (image + 1) / 2),
        (
            "from_0_to_255",
            "pixels from 0 to 255, not from -1 to 1",
            lambda image: (image + 1) * 127.5,
        ),
        (
            "imagenet",
            "ImageNet's mean and standard deviation",
            lambda image: _normalized(image, *IMAGENET),
        ),
        (
            "imagenet_bgr",
            "ImageNet's mean and standard deviation, on blue, green, red",
            lambda image: _normalized(image[..., ::-1], *IMAGENET),
        ),
        ("clip", "CLIP's mean and standard deviation", lambda image: _normalized(image, *CLIP)),
        ("gray", "all three colours are the brightness", lambda image: image @ BRIGHTNESS),
        (
            "upside_down",
            "EXIF ignored: the picture stands on its head",
            lambda image: np.rot90(image, 2),
        ),
        ("mirrored", "the picture is mirrored: left and right", lambda image: image[:, ::-1]),
        ("flipped", "the picture is mirrored: top and bottom", lambda image: image[::-1]),
        (
            "turned_left",
            "EXIF ignored: the picture is turned to the left",
            lambda image: np.rot90(image, 1),
        ),
        (
            "turned_right",
            "EXIF ignored: the picture is turned to the right",
            lambda image: np.rot90(image, 3),
        ),
    ],
    "patches": [
        (
            "grid_width_first",
            "the grid is written as (columns, rows)",
            lambda patches: patches.reshape(patches.shape[1], -1, *patches.shape[2:]),
        ),
        (
            "patch_cyx",
            "a patch in the order (channel, y, x), not (y, x, channel)",
            lambda patches: patches.transpose(0, 1, 4, 2, 3),
        ),
        (
            "patch_xyc",
            "a patch in the order (x, y, channel), not (y, x, channel)",
            lambda patches: patches.transpose(0, 1, 3, 2, 4),
        ),
        (
            "patch_cxy",
            "a patch in the order (channel, x, y), not (y, x, channel)",
            lambda patches: patches.transpose(0, 1, 4, 3, 2),
        ),
        (
            "tokens_by_column",
            "tokens column by column",
            lambda patches: patches.swapaxes(0, 1).reshape(patches.shape),
        ),
    ],
    "kernel": [
        (
            "kernel_cyx",
            "the patch kernel is laid out in the order (channel, y, x)",
            lambda patches: _channels_first(patches).transpose(0, 1, 3, 4, 2),
        ),
        (
            "kernel_xyc",
            "the patch kernel is laid out in the order (x, y, channel)",
            lambda patches: patches.transpose(0, 1, 3, 2, 4),
        ),
        (
            "kernel_cxy",
            "the patch kernel is laid out in the order (channel, x, y)",
            lambda patches: _channels_first(patches).transpose(0, 1, 4, 3, 2),
        ),
        (
            "kernel_bgr",
            "the patch kernel's colours are in the order blue, green, red",
            lambda patches: patches[..., ::-1],
        ),
        (
            "kernel_mirrored",
            "the patch kernel is mirrored: left and right",
            lambda patches: patches[..., ::-1, :],
        ),
        (
            "kernel_flipped",
            "the patch kernel is mirrored: top and bottom",
            lambda patches: patches[:, :, ::-1],
        ),
    ],
    "position": [
        (
            "position_left_out",
            "no position embedding is added",
            lambda table, size: 0 * _right(table, size),
        ),
        (
            "position_twice",
            "the position embedding is added twice",
            lambda table, size: 2 * _right(table, size),
        ),
        (
            "table_first_rows",
            "the table is not resized: its first h * w rows are added",
            lambda table, size: np.resize(table, (math.prod(size), table.shape[2])),
        ),
        ("table_corner", "the table is not resized: its top left corner is added", _corner),
        ("table_transposed", "the table is read transposed", _follows(transposed="table")),
        (
            "size_transposed",
            "the table is resized to (w, h), not (h, w)",
            _follows(transposed="size"),
        ),
        (
            "positions_by_column",
            "position embeddings are added column by column",
            _follows(transposed="order"),
        ),
        (
            "table_in_bfloat16",
            "the table is read in bfloat16",
            lambda table, size: _right(_to_bfloat16(table), size),
        ),
        (
            "product_in_bfloat16",
            "the table is resized by one product in bfloat16, perhaps under autocast",
            _product_in_bfloat16,
        ),
        (
            "table_bicubic",
            "the table is resized by bicubic",
            _follows(mode="bicubic", cubic_coefficient=-0.5),
        ),
        (
            "table_not_antialiased",
            "the table is resized by bilinear without antialiasing",
            _follows(antialias=False, outside="border"),
        ),
        (
            "table_bicubic_not_antialiased",
            "the table is resized by bicubic without antialiasing",
            _follows(mode="bicubic", cubic_coefficient=-0.75, antialias=False, outside="border"),
        ),
        (
            "table_area",
            "the table is resized by area (adaptive average pooling)",
            _by_torch(mode="area"),
        ),
        ("table_lanczos", "the table is resized by lanczos", _channels_by_lanczos),
        (
            "interpolate_unbatched",
            "F.interpolate of an unbatched table is wrong for a grid of one column: give it a batch axis of its own",
            _by_torch(mode="bilinear", antialias=True),
        ),
        (
            "table_align_corners",
            "the table is resized with aligned corners",
            _by_torch(mode="bilinear", align_corners=True),
        ),
    ],
    r"blocks\.\d+\.attn": [
        ("padding_not_masked", "padding is not masked in the blocks", _not_masked, "timm"),
        ("heads_halved", "half the number of heads", _heads(0.5)),
        ("heads_doubled", "twice the number of heads", _heads(2)),
        ("interleaved", "query, key, value are read as interleaved by head", _interleaved),
        ("no_attention", "attention is left out", _zero),
        ("one_head", "one attention head", _heads(0)),
        (
            "causal",
            "causal attention",
            lambda attention, run, x, mask: run(
                x, attn_mask=torch.ones(x.shape[1], x.shape[1]).tril().bool()
            ),
        ),
    ],
    r".*\.mlp\.act": [
        ("exact_gelu", "the exact GELU, not its approximation by tanh", _instead(F.gelu)),
        ("tanh_gelu", "GELU's approximation by tanh, not the exact one", _instead(nn.GELU("tanh"))),
        ("quick_gelu", "quick GELU, x * sigmoid(1.702 x)", _quick_gelu),
        ("relu", "ReLU in place of GELU", _instead(F.relu)),
        ("silu", "SiLU in place of GELU", _instead(F.silu)),
    ],
    r"blocks\.\d+\.norm[12]|norm|attn_pool\.norm": [
        ("eps_1e-5", "LayerNorm's eps is 1e-5, not 1e-6", _having(eps=1e-5)),
        ("eps_1e-12", "LayerNorm's eps is 1e-12, not 1e-6", _having(eps=1e-12)),
        (
            "rms_norm",
            "RMSNorm in place of LayerNorm",
            lambda norm, run, x, mask: F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps),
        ),
    ],
    r"blocks\.\d+\.attn\.q_norm": [
        ("no_scale", "attention is not scaled by 1 / sqrt(head size)", _not_scaled),
        ("scale_twice", "attention is scaled twice", _scaled_twice),
        (
            "scale_of_width",
            "attention is scaled by 1 / sqrt(width), not 1 / sqrt(head size)",
            _query_times(1, -0.5),
        ),
    ],
    r"blocks\.\d+\.attn\.qkv": [
        ("order_k_q_v", "query and key are exchanged", _parts(1, 0, 2)),
        ("order_v_k_q", "query and value are exchanged", _parts(2, 1, 0)),
        ("order_q_v_k", "key and value are exchanged", _parts(0, 2, 1)),
        ("order_k_v_q", "query, key, value are read as key, value, query", _parts(1, 2, 0)),
        ("order_v_q_k", "query, key, value are read as value, query, key", _parts(2, 0, 1)),
        ("no_qkv_bias", "no bias on query, key and value", _no_bias),
        ("no_q_bias", "no bias on query", _no_bias_on(0)),
        ("no_v_bias", "no bias on value", _no_bias_on(2)),
    ],
    r"blocks\.\d+\.attn\.proj": [
        ("no_out_bias", "no bias after attention", _no_bias),
        ("no_out_projection", "attention's output projection is left out", _left_out),
    ],
    r"blocks\.\d+\.mlp\.fc1": [
        ("no_fc1_bias", "no bias in the MLP's first layer", _no_bias),
    ],
    r"blocks\.\d+\.mlp\.fc2": [
        ("no_fc2_bias", "no bias in the MLP's second layer", _no_bias),
    ],
    r"blocks\.\d+": [
        ("post_norm", "LayerNorm after attention and MLP, not before", _post_norm),
        (
            "swapped_norms",
            "the two LayerNorms of a block are exchanged",
            _swapped_norms,
        ),
        (
            "no_attention_residual",
            "attention's input is not added to its output",
            _no_attention_residual,
        ),
        ("no_mlp_residual", "the MLP's input is not added to its output", _no_mlp_residual),
        (
            "parallel",
            "attention and MLP in parallel, not one after the other",
            _parallel,
        ),
    ],
    r"blocks\.\d+\.norm[12]": [
        ("no_norms", "no LayerNorm in the blocks", _left_out),
    ],
    r"blocks\.\d+\.mlp": [
        ("no_mlp", "the MLP is left out", _zero),
    ],
    r"blocks\.\d+\.norm1": [
        ("no_first_norm", "no LayerNorm before attention", _left_out),
    ],
    r"blocks\.\d+\.norm2": [
        ("no_second_norm", "no LayerNorm before the MLP", _left_out),
    ],
    "": [
        ("blocks_reversed", "the blocks in reverse order", _reversed_blocks),
    ],
    "norm": [
        ("no_last_norm", "the last LayerNorm is left out", _left_out),
    ],
    "attn_pool": [
        (
            "max_pooled",
            "the largest number of the tokens, without attention",
            lambda head, run, x, mask: _valid(x, mask).amax(1),
        ),
        (
            "pooling_heads_halved",
            "half the number of heads in the pooling",
            _heads(0.5),
        ),
        (
            "pooling_heads_doubled",
            "twice the number of heads in the pooling",
            _heads(2),
        ),
        (
            "mean_pooled",
            "the mean of the tokens, without attention",
            lambda head, run, x, mask: _valid(x, mask).mean(1),
        ),
        (
            "mean_of_padding_too",
            "the mean of all tokens, padding too",
            _instead(lambda x: x.mean(1)),
            "timm",
        ),
        ("first_token", "the first token, without attention", _instead(lambda x: x[:, 0])),
        ("pooling_not_masked", "padding is not masked in the pooling", _not_masked, "timm"),
        (
            "no_pooling_residual",
            "the head's MLP is not added to its input",
            lambda head, run, x, mask: head.mlp(head.norm(_attended(head, run, x, mask))),
        ),
        ("pooling_one_head", "the head attends with one head", _heads(0)),
        (
            "normalized",
            "the output is divided by its length",
            lambda head, run, x, mask: F.normalize(run(x), dim=-1),
        ),
    ],
    "attn_pool.q_norm": [
        ("pooling_scale_twice", "the head's attention is scaled twice", _scaled_twice),
        ("pooling_no_scale", "the head's attention is not scaled", _not_scaled),
    ],
    "attn_pool.mlp.act": [
        (
            "pooling_exact_gelu",
            "the exact GELU in the head, not its approximation by tanh",
            _instead(F.gelu),
        ),
        ("pooling_quick_gelu", "quick GELU in the head", _quick_gelu),
    ],
    "attn_pool.norm": [
        ("pooling_eps_1e-5", "the head's LayerNorm has eps 1e-5, not 1e-6", _having(eps=1e-5)),
        ("no_pooling_norm", "the head's LayerNorm is left out", _left_out),
    ],
    r"attn_pool\.(q|kv)": [
        ("pooling_no_qkv_bias", "no bias on the head's query, key and value", _no_bias),
    ],
    "attn_pool.q": [
        ("pooling_no_q_bias", "no bias on the head's query", _no_bias),
        ("probe_not_projected", "the probe is not projected to a query", _left_out),
    ],
    "attn_pool.proj": [
        ("pooling_no_out_bias", "no bias after the head's attention", _no_bias),
        ("no_pooling_projection", "the head's output projection is left out", _left_out),
    ],
    r"attn_pool\.mlp\.fc[12]": [
        ("pooling_no_mlp_bias", "no biases in the head's MLP", _no_bias),
    ],
    "attn_pool.mlp": [
        ("no_pooling_mlp", "the head's MLP is left out", _zero),
    ],
    "attn_pool.kv": [
        ("pooling_k_v", "key and value of the head are exchanged", _parts(1, 0)),
    ],
}
"""By their step: name, words, what is done there; and the padding, where it matters."""


def mistakes_of(model: Any) -> list[Mistake]:
    """Every mistake that is tried on a model: those of the list, and each block left out.

    One about padding is tried with each way to pad.
    """
    found = []
    for where, entries in MISTAKES.items():
        found += [Mistake(where, *entry) for entry in entries]
    for mistake in list(found):
        if mistake.padding:
            name = mistake.name
            words = f"{mistake.words}; tokens are padded to twice the most patches"
            found.append(mistake._replace(name=f"{name}_in_transformers", padding="transformers"))
            found.append(mistake._replace(name=f"{name}_twice", words=words, padding="twice"))
    for number in range(len(model.blocks)):
        name, words = f"block_{number}_left_out", f"block {number} is left out"
        found.append(Mistake(rf"blocks\.{number}", name, words, _left_out))
    return found
