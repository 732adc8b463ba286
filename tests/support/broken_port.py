"""The port of examples/ with lines that are wrong: each known mistake as a porter would type it.

A mistake is the text of a right line and what stands there instead; several for some.
"""

import math
from pathlib import Path

import numpy as np
import torch

SOURCE = Path(__file__).parents[2] / "examples" / "port_in_numpy.py"

RESIZE = "picture.resize(size, Image.Resampling.BILINEAR)"
PIXELS = "np.asarray(picture) / 255 * 2 - 1"
RGB = '.convert("RGB")'
ORDER = "patches.transpose(0, 2, 1, 3, 4)"
PATCHES = 'linear(pixels, weights, "embeddings.patch_embedding")'
POSITION = "position_embeddings(table, h, w)"
GELU = "0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))"
NORMED = "centred / np.sqrt(variance + EPS)"
SCALED = 'normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]'
SCORES = "query[:, own] @ key[:, own].T * scale"
MIXED = "mixed = attention(query, key, value, heads)"
ADDED = 'x = x + linear(mixed, weights, f"{name}.self_attn.out_proj")'
FIRST_NORM = 'layer_norm(x, weights, f"{name}.layer_norm1")'
SECOND_NORM = 'layer_norm(x, weights, f"{name}.layer_norm2")'
MLP = 'return x + mlp(normed, weights, f"{name}.mlp")'
BLOCK = 'block(x, weights, f"encoder.layers.{number}", heads)'
POOL = "pool(x, weights, heads)"
POOLED = "pooled = attention(query, key, value, heads)"
HEAD_MLP = 'pooled = pooled + mlp(normed, weights, "head.mlp")'
HEAD_OUT = 'linear(pooled, weights, "head.attention.out_proj")'


def line(right, wrong):
    return [(right, wrong)]


def added(wrong):
    return line(f"+ {POSITION}", f"+ {wrong}")


def pooled(wrong):
    return line(f"= {POOL}", f"= {wrong}")


def linear_without_bias(part):
    return line(
        f'linear(normed, weights, f"{{name}}.self_attn.{part}_proj")',
        f'normed @ weights[f"{{name}}.self_attn.{part}_proj.weight"].T',
    )


def head_activation(name):
    inside = f'{name}(linear(normed, weights, "head.mlp.fc1"))'
    return line(HEAD_MLP, f'pooled = pooled + linear({inside}, weights, "head.mlp.fc2")')


MISTAKES = {
    # From the picture to pixels.
    "squeezed": line("h, w = grid_of(", "h = w = math.isqrt(max_patches)  # "),
    "grid_width_first": line("return (h, w), patches", "return (w, h), patches"),
    "bgr": line(PIXELS, "np.asarray(picture)[..., ::-1] / 255 * 2 - 1"),
    "from_0_to_1": line(PIXELS, "np.asarray(picture) / 255"),
    "from_0_to_255": line(PIXELS, "np.asarray(picture) * 1.0"),
    "imagenet": line(PIXELS, "normalized(np.asarray(picture), IMAGENET)"),
    "imagenet_bgr": line(PIXELS, "normalized(np.asarray(picture)[..., ::-1], IMAGENET)"),
    "clip": line(PIXELS, "normalized(np.asarray(picture), CLIP)"),
    "gray": line(RGB, '.convert("L").convert("RGB")'),
    "nearest": line(RESIZE, "picture.resize(size, Image.Resampling.NEAREST)"),
    "bicubic": line(RESIZE, "picture.resize(size, Image.Resampling.BICUBIC)"),
    "lanczos": line(RESIZE, "picture.resize(size, Image.Resampling.LANCZOS)"),
    "box": line(RESIZE, "picture.resize(size, Image.Resampling.BOX)"),
    "hamming": line(RESIZE, "picture.resize(size, Image.Resampling.HAMMING)"),
    "bilinear_not_antialiased": line(RESIZE, 'by_torch(picture, size, mode="bilinear")'),
    "bicubic_not_antialiased": line(RESIZE, 'by_torch(picture, size, mode="bicubic")'),
    "bicubic_float": line(RESIZE, 'by_torch(picture, size, mode="bicubic", antialias=True)'),
    "nearest_floor": line(RESIZE, 'by_torch(picture, size, mode="nearest")'),
    "upside_down": line(RGB, RGB + ".transpose(Image.Transpose.ROTATE_180)"),
    "mirrored": line(RGB, RGB + ".transpose(Image.Transpose.FLIP_LEFT_RIGHT)"),
    "flipped": line(RGB, RGB + ".transpose(Image.Transpose.FLIP_TOP_BOTTOM)"),
    "turned_left": line(RGB, RGB + ".transpose(Image.Transpose.ROTATE_90)"),
    "turned_right": line(RGB, RGB + ".transpose(Image.Transpose.ROTATE_270)"),
    "patch_cyx": line(ORDER, "patches.transpose(0, 2, 4, 1, 3)"),
    "patch_xyc": line(ORDER, "patches.transpose(0, 2, 3, 1, 4)"),
    "patch_cxy": line(ORDER, "patches.transpose(0, 2, 4, 3, 1)"),
    "tokens_by_column": line(ORDER, "patches.transpose(2, 0, 1, 3, 4)"),
    # The embeddings.
    "kernel_cyx": line(PATCHES, "by_kernel(pixels, weights, lambda k: k.transpose(0, 3, 1, 2))"),
    "kernel_xyc": line(PATCHES, "by_kernel(pixels, weights, lambda k: k.transpose(0, 2, 1, 3))"),
    "kernel_cxy": line(PATCHES, "by_kernel(pixels, weights, lambda k: k.transpose(0, 3, 2, 1))"),
    "kernel_bgr": line(PATCHES, "by_kernel(pixels, weights, lambda k: k[..., ::-1])"),
    "kernel_mirrored": line(PATCHES, "by_kernel(pixels, weights, lambda k: k[:, :, ::-1])"),
    "kernel_flipped": line(PATCHES, "by_kernel(pixels, weights, lambda k: k[:, ::-1])"),
    "position_left_out": added("0"),
    "position_twice": added(f"2 * {POSITION}"),
    "table_first_rows": added("np.resize(table, (h * w, table.shape[2]))"),
    "table_corner": added(
        "table[np.arange(h).clip(max=5)][:, np.arange(w).clip(max=5)].reshape(h * w, -1)"
    ),
    "table_transposed": added("position_embeddings(table.swapaxes(0, 1), h, w)"),
    "size_transposed": added("position_embeddings(table, w, h)"),
    "positions_by_column": line("cells.reshape(", "cells.swapaxes(0, 1).reshape("),
    "table_in_bfloat16": added("position_embeddings(rounded(table), h, w)"),
    "product_in_bfloat16": added(
        "rounded(rounded(np.kron(resize_matrix(h, 6), resize_matrix(w, 6)))"
        " @ rounded(table).reshape(36, -1))",
    ),
    "table_bicubic": added('by_torch(table, (w, h), True, mode="bicubic", antialias=True)'),
    "table_not_antialiased": line("reach = max(scale, 1)", "reach = 1"),
    "table_bicubic_not_antialiased": added('by_torch(table, (w, h), True, mode="bicubic")'),
    "table_area": added('by_torch(table, (w, h), True, mode="area")'),
    "table_lanczos": line(
        "np.maximum(1 - distance, 0)", "np.sinc(distance) * np.sinc(distance / 3) * (distance < 3)"
    ),
    "table_align_corners": added(
        'by_torch(table, (w, h), True, mode="bilinear", align_corners=True)'
    ),
    # The blocks.
    "exact_gelu": line(GELU, "exact_gelu(x)"),
    "quick_gelu": line(GELU, "x / (1 + np.exp(-1.702 * x))"),
    "relu": line(GELU, "np.maximum(x, 0)"),
    "silu": line(GELU, "x / (1 + np.exp(-x))"),
    "eps_1e-5": line("EPS = 1e-6", "EPS = 1e-5"),
    "eps_1e-12": line("EPS = 1e-6", "EPS = 1e-12"),
    "rms_norm": [
        (NORMED, "x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS)"),
        (SCALED, 'normed * weights[f"{name}.weight"]'),
    ],
    "heads_halved": line(MIXED, "mixed = attention(query, key, value, heads // 2)"),
    "heads_doubled": line(MIXED, "mixed = attention(query, key, value, 2 * heads)"),
    "one_head": line(MIXED, "mixed = attention(query, key, value, 1)"),
    "no_scale": line(MIXED, "mixed = attention(query * 8**0.5, key, value, heads)"),
    "scale_twice": line(MIXED, "mixed = attention(query / 8**0.5, key, value, heads)"),
    "scale_of_width": line(MIXED, "mixed = attention(query / heads**0.5, key, value, heads)"),
    "order_k_q_v": line(MIXED, "mixed = attention(key, query, value, heads)"),
    "order_v_k_q": line(MIXED, "mixed = attention(value, key, query, heads)"),
    "order_q_v_k": line(MIXED, "mixed = attention(query, value, key, heads)"),
    "order_k_v_q": line(MIXED, "mixed = attention(key, value, query, heads)"),
    "order_v_q_k": line(MIXED, "mixed = attention(value, query, key, heads)"),
    "interleaved": line(MIXED, "mixed = attention(*interleaved(query, key, value, heads), heads)"),
    "no_qkv_bias": [
        *linear_without_bias("q"),
        *linear_without_bias("k"),
        *linear_without_bias("v"),
    ],
    "no_q_bias": linear_without_bias("q"),
    "no_v_bias": linear_without_bias("v"),
    "no_out_bias": line(ADDED, 'x = x + mixed @ weights[f"{name}.self_attn.out_proj.weight"].T'),
    "no_out_projection": line(ADDED, "x = x + mixed"),
    "no_fc1_bias": line(MLP, MLP.replace("weights", 'without(weights, "fc1.bias")')),
    "no_fc2_bias": line(MLP, MLP.replace("weights", 'without(weights, "fc2.bias")')),
    "post_norm": [
        (FIRST_NORM, "x"),
        (ADDED, f"{ADDED}; x = {FIRST_NORM}"),
        (f"normed = {SECOND_NORM}", "normed = x"),
        (MLP, f"{MLP.replace('return', 'x =')}; return {SECOND_NORM}"),
    ],
    "swapped_norms": [
        (f"normed = {SECOND_NORM}\n    return", f"normed = {FIRST_NORM} \n    return"),
        (f"normed = {FIRST_NORM}\n", f"normed = {SECOND_NORM}\n"),
    ],
    "no_norms": [(FIRST_NORM, "x"), (SECOND_NORM, "x")],
    "no_first_norm": line(FIRST_NORM, "x"),
    "no_second_norm": line(SECOND_NORM, "x"),
    "no_attention_residual": line(ADDED, ADDED.replace("x = x +", "x =")),
    "no_mlp_residual": line(MLP, MLP.replace("x +", "")),
    "no_attention": line(ADDED, ""),
    "no_mlp": line(MLP, "return x"),
    "parallel": [
        (ADDED, f"before = x; {ADDED}"),
        (SECOND_NORM, SECOND_NORM.replace("x", "before", 1)),
    ],
    "causal": line(SCORES, f"causal({SCORES})"),
    "blocks_reversed": line(BLOCK, BLOCK.replace("number", "2 - number")),
    "block_0_left_out": line(BLOCK, f"x if number == 0 else {BLOCK}"),
    "block_1_left_out": line(BLOCK, f"x if number == 1 else {BLOCK}"),
    "block_2_left_out": line(BLOCK, f"x if number == 2 else {BLOCK}"),
    "no_last_norm": line('x = layer_norm(x, weights, "post_layernorm")', ""),
    # The head.
    "max_pooled": pooled("x.max(axis=0)"),
    "mean_pooled": pooled("x.mean(axis=0)"),
    "first_token": pooled("x[0]"),
    "normalized": pooled(f"{POOL} / np.linalg.norm({POOL})"),
    "pooling_heads_halved": line(POOLED, POOLED.replace("heads", "heads // 2")),
    "pooling_heads_doubled": line(POOLED, POOLED.replace("heads", "2 * heads")),
    "pooling_one_head": line(POOLED, POOLED.replace("heads", "1")),
    "pooling_no_scale": line(POOLED, POOLED.replace("query", "query * 8**0.5")),
    "pooling_scale_twice": line(POOLED, POOLED.replace("query", "query / 8**0.5")),
    "pooling_k_v": line(POOLED, "pooled = attention(query, value, key, heads)"),
    "pooling_exact_gelu": head_activation("exact_gelu"),
    "pooling_quick_gelu": head_activation("quick_gelu"),
    "pooling_no_qkv_bias": line(
        'weights["head.attention.in_proj_bias"]', '0 * weights["head.attention.in_proj_bias"]'
    ),
    "pooling_no_q_bias": line("probe @ query_kernel.T + query_bias", "probe @ query_kernel.T"),
    "probe_not_projected": line("probe @ query_kernel.T + query_bias", "probe"),
    "pooling_no_out_bias": line(HEAD_OUT, 'pooled @ weights["head.attention.out_proj.weight"].T'),
    "no_pooling_projection": line(HEAD_OUT, "pooled"),
    "pooling_no_mlp_bias": line(HEAD_MLP, HEAD_MLP.replace("weights", 'without(weights, "bias")')),
    "no_pooling_norm": line('layer_norm(pooled, weights, "head.layernorm")', "pooled"),
    "no_pooling_residual": line(HEAD_MLP, HEAD_MLP.replace("pooled + ", "")),
    "no_pooling_mlp": line(HEAD_MLP, ""),
}


# What the wrong lines call.


def by_torch(numbers, size, flat=False, **options):
    """PyTorch's resize of (H, W, C) numbers to (width, height)."""
    channels = torch.tensor(np.array(numbers, np.float64)).permute(2, 0, 1)[None]
    found = torch.nn.functional.interpolate(channels, size[::-1], **options)[0].permute(1, 2, 0)
    return found.flatten(0, 1).numpy() if flat else found.numpy()


def normalized(colours, mean_and_std):
    mean, std = mean_and_std
    return (colours / 255 - mean) / std


def rounded(numbers):
    return torch.tensor(numbers).bfloat16().double().numpy()


def by_kernel(pixels, weights, change):
    """A patch embedding whose kernel (C, y, x, channel) is laid out otherwise."""
    kernel = weights["embeddings.patch_embedding.weight"].reshape(-1, 8, 8, 3)
    wrong = change(kernel).reshape(len(kernel), -1)
    return pixels @ wrong.T + weights["embeddings.patch_embedding.bias"]


def without(weights, end):
    return {name: one * (not name.endswith(end)) for name, one in weights.items()}


def exact_gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def quick_gelu(x):
    return x / (1 + np.exp(-1.702 * x))


def interleaved(query, key, value, heads):
    rows = np.concatenate([query, key, value], 1).reshape(len(query), heads, 3, -1)
    return np.split(rows.swapaxes(1, 2).reshape(len(query), -1), 3, 1)


def causal(scores):
    """Of the blocks: the probe of the head, alone in its row, sees all."""
    if len(scores) == 1:
        return scores
    return np.where(np.tri(len(scores), dtype=bool), scores, -np.inf)


HELPERS = [by_torch, normalized, rounded, by_kernel, without, exact_gelu, quick_gelu, interleaved]
CONSTANTS = {
    "IMAGENET": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "CLIP": (
        (0.48145466, 0.4578275, 0.40821073),
        (0.26862954, 0.26130258, 0.27577711),
    ),
}


def port_with(*mistakes):
    """The functions of the port with these mistakes in it, by their names."""
    source = SOURCE.read_text(encoding="utf-8")
    for name in mistakes:
        for right, wrong in MISTAKES[name]:
            assert source.count(right) == 1, (name, right, source.count(right))
            source = source.replace(right, wrong)
    source = source.replace("Image.open(file)", "file")
    functions = {one.__name__: one for one in [*HELPERS, causal]} | CONSTANTS | {"__name__": "port"}
    exec(compile(source, "port", "exec"), functions)
    return functions


def run(recording, weights, pictures=None, mistakes=()):
    """The stages of a port with mistakes; without ``pictures``, from the recorded pixels."""
    port = port_with(*mistakes)
    about = recording.about
    written = []
    for number, own in enumerate(recording.stages):
        stages = {}
        grid, pixels = own["grid"], own["pixels"]
        if pictures is not None:
            side = about["patch_size"]
            grid, pixels = port["read_pixels"](pictures[number], side, about["max_patches"])
            stages = {"grid": np.array(grid), "pixels": pixels}
        h, w = map(int, grid)
        table = np.float64(recording.table)
        stages |= port["tower"](pixels, h, w, table, weights, about["heads"])
        written.append(stages)
    return written


def weights_of(model):
    """A timm model's weights under transformers' names, as NumPy arrays."""
    from timm_naflex_fast.commands.measure.tower_names import to_transformers

    named = to_transformers(dict(model.state_dict()))
    return {name: one.double().numpy() for name, one in named.items()}


def is_read(name):
    """Whether a mistake shows in the grid or the pixels."""
    return name in [*MISTAKES][: [*MISTAKES].index("kernel_cyx")]
