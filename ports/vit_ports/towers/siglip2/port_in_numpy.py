"""SigLIP-2's image tower (NaFlex) in NumPy: a specification that runs, for those who port it.

It reads the pictures of a recording, and weights under transformers' names, and writes what each
stage gives. ports/README.md describes both folders. Then compare it, or your own port:

    python ports/vit_ports/towers/siglip2/port_in_numpy.py ports/kit port
    vit-ports compare ports/kit port

The known mistakes of recordings are wrong lines of this file, so that a change here may need one there:
mistakes.diff. Tests: ports/tests/test_ports.py.

It takes one picture at a time, so there is no padding. Who computes a padded batch has to mask the
padding twice: in the attention of each block, and in the pooling. All numbers are float64 here, and
are written as float32.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.numpy import load_file, save_file

EPS = 1e-6  # of every LayerNorm
FILTER = Image.Resampling.BILINEAR  # how pictures are resized; Pillow antialiases


def grid_of(height, width, patch_size, max_patches):
    """The grid (h, w) of a picture: as many patches as are allowed, in the picture's shape.

    The original searches the scale between two bounds, so we do it with its bounds and its end.
    """

    def grid_at(scale):
        h = max(1, math.ceil(height * scale / patch_size))
        w = max(1, math.ceil(width * scale / patch_size))
        return h, w

    fits = 1e-6
    too_large = 100.0
    while too_large - fits >= 1e-5:
        scale = (fits + too_large) / 2
        h, w = grid_at(scale)
        if h * w <= max_patches:
            fits = scale
        else:
            too_large = scale
    return grid_at(fits)


def read_picture(picture, patch_size, max_patches):
    """A picture's grid (h, w), and the picture resized to fill it, (h * p, w * p, 3) from 0 to 255."""
    picture = picture.convert("RGB")
    h, w = grid_of(picture.height, picture.width, patch_size, max_patches)
    size = (w * patch_size, h * patch_size)  # Pillow wants the width first
    picture = picture.resize(size, FILTER)  # its shape changes a little
    return (h, w), np.asarray(picture)


def cut_patches(image, patch_size, mean, std):
    """The patches of an image (h * p, w * p, 3), (h * w, p * p * 3): from -1 to 1 for SigLIP-2."""
    pixels = (image / 255 - mean) / std  # of red, green, blue; all 0.5 for SigLIP-2

    # The grid goes row by row, and inside a patch the pixels go row by row.
    h = len(pixels) // patch_size
    patches = pixels.reshape(h, patch_size, -1, patch_size, 3)
    patches = patches.transpose(0, 2, 1, 3, 4)  # (h, w, y, x, channel)
    return patches.reshape(-1, patch_size * patch_size * 3)


def resize_matrix(length, table_length):
    """A (n, n0): what each of n0 table cells weighs in each of n grid cells, along one axis."""
    scale = table_length / length
    centres = scale * (np.arange(length) + 0.5)  # (n,) where the grid cells lie in the table
    cells = np.arange(table_length) + 0.5  # (n0,)

    # A triangle around each centre. Where the table is made smaller it is wider (antialiasing).
    reach = max(scale, 1)
    distance = np.abs(cells - centres[:, None]) / reach  # (n, n0)
    weights = np.maximum(1 - distance, 0)

    # Taps outside the table are dropped, and those that remain sum to 1.
    return weights / weights.sum(axis=1, keepdims=True)


def position_embeddings(table, h, w):
    """The table (H0, W0, C) resized to a grid, (h * w, C): A_h . P . A_w^T for each channel."""
    rows = np.einsum("ij,jkc->ikc", resize_matrix(h, table.shape[0]), table)  # (h, W0, C)
    cells = np.einsum("lk,ikc->ilc", resize_matrix(w, table.shape[1]), rows)  # (h, w, C)
    return cells.reshape(h * w, -1)


def linear(x, weights, name):
    """Multiply tokens (N, C) by a kernel (D, C), and add a bias (D,)."""
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def layer_norm(x, weights, name):
    """Give each token mean 0 and variance 1, then scale and shift each channel."""
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt(variance + EPS)
    return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def gelu(x):
    """GELU in its approximation by tanh, not the exact one."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def mlp(x, weights, name):
    """Two layers with GELU between them."""
    hidden = gelu(linear(x, weights, f"{name}.fc1"))
    return linear(hidden, weights, f"{name}.fc2")


def attention(query, key, value, heads):
    """Queries (M, C) look at keys and values (N, C); each head sees its own channels."""
    head_size = query.shape[1] // heads
    scale = 1 / math.sqrt(head_size)
    outputs = []
    for head in range(heads):
        own = slice(head * head_size, (head + 1) * head_size)
        scores = query[:, own] @ key[:, own].T * scale  # (M, N)
        # Softmax. The largest score is taken off first, so that nothing overflows.
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares = shares / shares.sum(axis=1, keepdims=True)
        outputs.append(shares @ value[:, own])  # (M, head_size)
    return np.concatenate(outputs, axis=1)  # (M, C)


def block(x, weights, name, heads):
    """A transformer block: each half reads normed tokens and adds to the tokens."""
    normed = layer_norm(x, weights, f"{name}.layer_norm1")
    query = linear(normed, weights, f"{name}.self_attn.q_proj")
    key = linear(normed, weights, f"{name}.self_attn.k_proj")
    value = linear(normed, weights, f"{name}.self_attn.v_proj")
    mixed = attention(query, key, value, heads)
    x = x + linear(mixed, weights, f"{name}.self_attn.out_proj")

    normed = layer_norm(x, weights, f"{name}.layer_norm2")
    return x + mlp(normed, weights, f"{name}.mlp")


def pool(x, weights, heads):
    """The attention pooling head: one learned query, the probe, looks at all tokens."""
    # The kernels of query, key and value lie one below the other.
    query_kernel, key_kernel, value_kernel = np.split(weights["head.attention.in_proj_weight"], 3)
    query_bias, key_bias, value_bias = np.split(weights["head.attention.in_proj_bias"], 3)
    probe = weights["head.probe"][0]  # (1, C)
    query = probe @ query_kernel.T + query_bias
    key = x @ key_kernel.T + key_bias
    value = x @ value_kernel.T + value_bias
    pooled = attention(query, key, value, heads)  # (1, C)
    pooled = linear(pooled, weights, "head.attention.out_proj")

    # The probe itself is not added. The head's MLP has a LayerNorm and adds to its input.
    normed = layer_norm(pooled, weights, "head.layernorm")
    pooled = pooled + mlp(normed, weights, "head.mlp")
    return pooled[0]  # (C,)


def step(stage, x, grid, about, table, weights):
    """One stage, from what the stage before it gave; the pixels are made of an image."""
    h, w = grid
    heads = about["heads"]
    if stage == "pixels":
        mean = np.array(about["mean"])
        return cut_patches(x, about["patch_size"], mean, np.array(about["std"]))
    if stage == "patch_embedding":
        return linear(x, weights, "embeddings.patch_embedding")  # (h * w, C)
    if stage == "position_embedding":
        return x + position_embeddings(table, h, w)
    if stage == "norm":
        return layer_norm(x, weights, "post_layernorm")
    if stage == "pooled":
        return pool(x, weights, heads)  # (C,)
    number = int(stage.removeprefix("block_"))
    return block(x, weights, f"encoder.layers.{number}", heads)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reference", metavar="REFERENCE", type=Path, help="folder of a recording")
    parser.add_argument(
        "port", metavar="PORT", type=Path, help="folder; stages.safetensors is written there"
    )
    parser.add_argument(
        "--weights",
        metavar="FILE",
        type=Path,
        help="safetensors under transformers' names, not in bfloat16 "
        "(default: REFERENCE/weights/transformers.safetensors)",
    )
    parser.add_argument(
        "--pixels",
        action="store_true",
        help="begin with the recorded pixels; grid and pixels are not written then",
    )
    options = parser.parse_args()
    reference = options.reference
    weights_file = options.weights or reference / "weights" / "transformers.safetensors"
    for file in (reference / "recording.json", weights_file):
        if not file.is_file():
            parser.exit(2, f"{file} is not there\n")

    about = json.loads((reference / "recording.json").read_text(encoding="utf-8"))
    recorded = load_file(reference / "stages.safetensors")
    # A whole model holds a text tower too, and names the image tower before each name.
    weights = {}
    for name, numbers in load_file(weights_file).items():
        weights[name.removeprefix("vision_model.")] = numbers.astype(np.float64)
    # transformers holds the table as rows (H0 * W0, C).
    rows = weights["embeddings.position_embedding.weight"]
    table = rows.reshape(*about["table_size"], rows.shape[1])

    written = {}
    for number, picture in enumerate(about["pictures"]):
        stages = [stage["name"] for stage in about["stages"]]
        stages = stages[stages.index("pixels") :]
        if options.pixels:
            stages.remove("pixels")
            grid = recorded[f"{number:03}.grid"].astype(int)
            x = recorded[f"{number:03}.pixels"].astype(np.float64)
        else:
            with Image.open(reference / picture["file"]) as opened:
                grid, x = read_picture(opened, about["patch_size"], about["max_patches"])
            written[f"{number:03}.grid"] = np.array(grid, np.int32)
        for stage in stages:
            x = step(stage, x, grid, about, table, weights)
            written[f"{number:03}.{stage}"] = x.astype(np.float32)

    options.port.mkdir(parents=True, exist_ok=True)
    save_file(written, options.port / "stages.safetensors")
    print(f"written: {options.port / 'stages.safetensors'} ({len(about['pictures'])} pictures)")


if __name__ == "__main__":
    main()
