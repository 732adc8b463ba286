"""SigLIP-2's image tower under the names of three libraries, and in their layouts.

transformers has a projection each for query, key and value; big_vision, in which Google trained the
weights and publishes them, has names and layouts of flax, which timm reads.
"""

import math
import re
from collections.abc import Collection, Iterator
from typing import Any

from .weight_files import HOW_TO_FIT, TAKEN, Tensors, Unusable

# One tower in another library and in timm: the other's tensors on the left, put one below the other,
# are timm's on the right. "#" stands for the number of a block, "*" for "weight" and "bias".
TRANSFORMERS = """
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
head.probe = attn_pool.latent
head.attention.in_proj_* = attn_pool.q.* attn_pool.kv.*
head.attention.out_proj.* = attn_pool.proj.*
head.layernorm.* = attn_pool.norm.*
head.mlp.fc1.* = attn_pool.mlp.fc1.*
head.mlp.fc2.* = attn_pool.mlp.fc2.*
"""
# Google's arrays. "#" stands for the number of a block, after "_", or for nothing where each array
# holds all blocks; "*" for "kernel" and "bias"; "+" for "scale" and "bias".
BIG_VISION = """
embedding/*
pos_embedding
Transformer/encoderblock#/LayerNorm_0/+
Transformer/encoderblock#/MultiHeadDotProductAttention_0/query/*
Transformer/encoderblock#/MultiHeadDotProductAttention_0/key/*
Transformer/encoderblock#/MultiHeadDotProductAttention_0/value/*
Transformer/encoderblock#/MultiHeadDotProductAttention_0/out/*
Transformer/encoderblock#/LayerNorm_1/+
Transformer/encoderblock#/MlpBlock_0/Dense_0/*
Transformer/encoderblock#/MlpBlock_0/Dense_1/*
Transformer/encoder_norm/+
MAPHead_0/probe
MAPHead_0/MultiHeadDotProductAttention_0/query/*
MAPHead_0/MultiHeadDotProductAttention_0/key/*
MAPHead_0/MultiHeadDotProductAttention_0/value/*
MAPHead_0/MultiHeadDotProductAttention_0/out/*
MAPHead_0/LayerNorm_0/+
MAPHead_0/MlpBlock_0/Dense_0/*
MAPHead_0/MlpBlock_0/Dense_1/*
"""
BLOCK = re.compile(r"(?:blocks\.|layers\.|encoderblock_)(\d+)[./]")
POOLING = ("attn_pool.", "head.", "MAPHead_0/")  # the head that pools, which a tower may lack
PATCHES = "embeds.proj.weight"  # (C, side * side * 3)
TABLE = "embeds.pos_embed"  # (1, h, w, C)
CELLS = "embeddings.position_embedding.weight"  # transformers' table, (n * n, C)
# How PEFT names what it adds to a model, and what it adds to.
ADAPTER = re.compile(r"base_model\.model\.|\.base_layer\.|lora_")


def from_transformers(tower: Tensors) -> Tensors:
    """transformers' Siglip2 tower (names without a prefix) as timm's.

    The tower may lack the head that pools.

    Raises:
        Unusable: tensors are missing, or are not Siglip2's (counts and names them); or the table is
            no square.
    """
    result = _renamed(tower, TRANSFORMERS)
    # transformers has the cells of a square in a row.
    cells = result[TABLE]
    side = math.isqrt(len(cells))
    if side * side != len(cells):
        raise Unusable(f"a position table of {len(cells)} cells, which are no square")
    result[TABLE] = cells.reshape(1, side, side, -1)
    return result


def to_transformers(tower: Tensors) -> Tensors:
    """timm's Siglip2 tower as transformers', with or without the head that pools.

    Raises:
        Unusable: tensors are missing, or are not Siglip2's (counts and names them).
        ValueError: the position table is no square, as transformers' is.
    """
    result = _renamed(tower, TRANSFORMERS, back=True)
    _, height, width, _ = result[CELLS].shape
    if height != width:
        raise ValueError(
            f"its position table has {height} x {width} cells: transformers' is a square"
        )
    result[CELLS] = result[CELLS].flatten(0, 2)
    return result


def outline_of_big_vision(tower: Tensors) -> tuple[Tensors, int]:
    """What tells the size of Google's image tower, under timm's names, and its attention heads.

    Args:
        tower: names without a prefix, NumPy arrays; each block's arrays under names of their own
            (``encoderblock_0``), or stacked (``encoderblock``), as ``scan=True`` makes them.

    Raises:
        Unusable: arrays are missing, or are not SigLIP-2's (counts and names them).
    """
    blocks = [f"_{number}" for number in range(count_blocks(tower))] or [""]
    needed = set()
    for line in BIG_VISION.split():
        if line.startswith(POOLING) and not has_pooling(tower):
            continue
        for block in blocks:
            for kind in ("kernel", "bias"):
                name = line.replace("#", block).replace("*", kind)
                needed.add(name.replace("+", kind.replace("kernel", "scale")))
    check_names("SigLIP-2's tower", needed - tower.keys(), tower.keys() - needed)

    first = f"Transformer/encoderblock{blocks[0]}"
    inside = tower[f"{first}/MlpBlock_0/Dense_0/bias"]  # (inside) or (blocks, inside)
    query = tower[f"{first}/MultiHeadDotProductAttention_0/query/bias"]  # (..., heads, C / heads)
    outline = {PATCHES: tower["embedding/kernel"].T, TABLE: tower["pos_embedding"][None]}
    depth = len(blocks)
    if blocks == [""]:
        depth = len(inside)
        inside = inside[0]
    for number in range(depth):
        outline[f"blocks.{number}.mlp.fc1.weight"] = inside
    if has_pooling(tower):
        outline["attn_pool.latent"] = tower["MAPHead_0/probe"]
    return outline, query.shape[-2]


def channels_first(patches: Any) -> Any:
    """Patches (..., y * x * channel) in the order (..., channel * y * x), of three channels."""
    return patches.unflatten(-1, (-1, 3)).mT.flatten(-2)


def channels_last(patches: Any) -> Any:
    """The inverse of :func:`channels_first`."""
    return patches.unflatten(-1, (3, -1)).mT.flatten(-2)


def count_blocks(tower: Tensors) -> int:
    """How many blocks there are, under the names of any of the libraries."""
    return len(set(BLOCK.findall(" ".join(tower))))


def has_pooling(tower: Tensors) -> bool:
    """Whether a tower has the head that pools."""
    return any(name.startswith(POOLING) for name in tower)


def _lines(tower: Tensors, mapping: str) -> Iterator[str]:
    """The lines of a mapping with every name written out, for a tower of as many blocks."""
    lines: dict[str, None] = {}  # each once
    for block in range(max(1, count_blocks(tower))):
        for kind in ("weight", "bias"):
            written = mapping.replace("#", str(block)).replace("*", kind)
            lines |= dict.fromkeys(written.strip().splitlines())
    pools = has_pooling(tower)
    for line in lines:
        if pools or not line.startswith(POOLING):
            yield line


def _renamed(tower: Tensors, mapping: str, *, back: bool = False) -> dict[str, Any]:
    """The tensors under the names on the right of a mapping, or ``back`` under those on the left.

    Raises:
        Unusable: a name is not found, or a tensor is not used.
    """
    import torch

    # All names are looked at before any tensor is: what differs is told with all its names.
    needed: set[str] = set()
    pairs = []
    for line in _lines(tower, mapping):
        sides = [side.split() for side in line.split(" = ")]
        if back:
            sides.reverse()
        needed.update(sides[0])
        pairs.append(sides)
    check_names("Siglip2's tower", needed - tower.keys(), tower.keys() - needed)

    result: dict[str, Any] = {}
    for old, new in pairs:
        whole = torch.cat([tower[name] for name in old])
        # The rows of a query, key and value projection: together, as query and the rest, or each.
        third = len(whole) // 3
        ends = [third, 2 * third]
        result |= zip(new, whole.tensor_split(ends[: len(new) - 1]))
    return result


def check_names(whose: str, missing: Collection[str], unused: Collection[str]) -> None:
    """Refuse weights of other names: count and name what is missing from them, or left over.

    Raises:
        Unusable: there is something.
    """
    if not missing and not unused:
        return
    if any(map(ADAPTER.search, unused)):
        raise Unusable(
            f"an adapter of PEFT beside or without its model {sorted(unused)[:2]}: save what "
            "merge_and_unload() returns"
        )
    raise Unusable(
        f"names that do not fit: {len(missing)} tensors of {whose} are not in it "
        f"{sorted(missing)[:3]}, and {whose} does not use {len(unused)} of its tensors "
        f"{sorted(unused)[:3]}",
        f"{TAKEN}; {HOW_TO_FIT}",
    )
