"""SigLIP-2's image tower under the names of timm and of transformers.

transformers has a projection each for query, key and value.
"""

import math
import re
from collections.abc import Set
from itertools import chain, product
from typing import Any

from .weight_files import Tensors

# One tower in another library and in timm: the other's tensors on the left, put one below the other,
# are timm's on the right. "#" stands for the number of a block, "*" for "weight" and "bias".
TOWER = """\
embeddings.patch_embedding.* = embeds.proj.*
embeddings.position_embedding.weight = embeds.pos_embed
encoder.layers.#.layer_norm1.* = blocks.#.norm1.*
encoder.layers.#.self_attn.q_proj.* encoder.layers.#.self_attn.k_proj.* \
encoder.layers.#.self_attn.v_proj.* = blocks.#.attn.qkv.*
encoder.layers.#.self_attn.out_proj.* = blocks.#.attn.proj.*
encoder.layers.#.layer_norm2.* = blocks.#.norm2.*
encoder.layers.#.mlp.fc1.* = blocks.#.mlp.fc1.*
encoder.layers.#.mlp.fc2.* = blocks.#.mlp.fc2.*
post_layernorm.* = norm.*
"""
HEAD = """\
head.probe = attn_pool.latent
head.attention.in_proj_* = attn_pool.q.* attn_pool.kv.*
head.attention.out_proj.* = attn_pool.proj.*
head.layernorm.* = attn_pool.norm.*
head.mlp.fc1.* = attn_pool.mlp.fc1.*
head.mlp.fc2.* = attn_pool.mlp.fc2.*
"""
BLOCK = re.compile(r"(?:blocks|layers)\.(\d+)\.")
POOLING = ("attn_pool.", "head.")  # the head that pools, which a tower may lack
TABLE = "embeds.pos_embed"  # (1, h, w, C)
SHOWN = 3  # names of tensors that are missing, or are too many
CELLS = "embeddings.position_embedding.weight"  # transformers' table, (n * n, C)


def from_transformers(tower: Tensors) -> dict[str, Any]:
    """transformers' Siglip2 tower (names without a prefix) as timm's.

    The tower may lack the head that pools.

    Raises:
        ValueError: tensors are missing, or are not Siglip2's (counts and names them).
        RuntimeError: the table is no square.
    """
    result = _renamed(tower)
    # transformers has the cells of a square in a row.
    cells, width = result[TABLE].shape
    side = math.isqrt(cells)
    result[TABLE] = result[TABLE].reshape(1, side, side, width)
    return result


def to_transformers(tower: Tensors) -> dict[str, Any]:
    """timm's Siglip2 tower as transformers', with or without the head that pools.

    Raises:
        ValueError: tensors are missing, or are not Siglip2's (counts and names them).
        ValueError: the position table is no square, as transformers' is.
    """
    result = _renamed(tower, back=True)
    _, height, width, _ = result[CELLS].shape
    if height != width:
        raise ValueError(
            f"its position table has {height} x {width} cells: transformers' is a square"
        )
    result[CELLS] = result[CELLS].flatten(0, 2)
    return result


def _renamed(tower: Tensors, *, back: bool = False) -> dict[str, Any]:
    """transformers' tensors under timm's names, or ``back``.

    Raises:
        ValueError: a name is not found, or a tensor is not used; counts and names them.
    """
    import torch

    mapping = TOWER
    if any(name.startswith(POOLING) for name in tower):
        mapping += HEAD
    blocks = {int(block) for block in BLOCK.findall(" ".join(tower))}
    pairs = {}
    for kind, block in product(("weight", "bias"), blocks):
        for line in mapping.replace("*", kind).replace("#", str(block)).splitlines():
            old, new = [tuple(names.split()) for names in line.split(" = ")]
            if back:
                old, new = new, old
            pairs[old] = new
    known = set(chain.from_iterable(pairs))
    if known != tower.keys():
        lacks = _in_words(known - tower.keys())
        has = _in_words(tower.keys() - known)
        raise ValueError(f"no NaFlex tower of SigLIP-2: it lacks {lacks}; it also has {has}")
    result: dict[str, Any] = {}
    for old_names, new_names in pairs.items():
        whole = torch.cat([tower[name] for name in old_names])
        # Two or three names take the rows of a projection to query, key and value.
        third = len(whole) // 3
        ends = [third, 2 * third][: len(new_names) - 1]
        result |= zip(new_names, whole.tensor_split(ends))
    return result


def _in_words(names: Set[str]) -> str:
    """The first names, and how many there are."""
    if not names:
        return "none"
    return f"{', '.join(sorted(names)[:SHOWN])} ({len(names)})"
