"""SigLIP-2's image tower under the names of three libraries, and in their layouts.

transformers has a projection each for query, key and value; big_vision, in which Google trained the
weights and publishes them, has names and layouts of flax.
"""

import re
from collections.abc import Collection, Iterator
from typing import Any

from .weight_files import Tensors, Unusable

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
BIG_VISION = """
embedding.* = embeds.proj.*
pos_embedding = embeds.pos_embed
Transformer.encoderblock_#.LayerNorm_0.* = blocks.#.norm1.*
Transformer.encoderblock_#.MultiHeadDotProductAttention_0.query.* \
Transformer.encoderblock_#.MultiHeadDotProductAttention_0.key.* \
Transformer.encoderblock_#.MultiHeadDotProductAttention_0.value.* = blocks.#.attn.qkv.*
Transformer.encoderblock_#.MultiHeadDotProductAttention_0.out.* = blocks.#.attn.proj.*
Transformer.encoderblock_#.LayerNorm_1.* = blocks.#.norm2.*
Transformer.encoderblock_#.MlpBlock_0.Dense_0.* = blocks.#.mlp.fc1.*
Transformer.encoderblock_#.MlpBlock_0.Dense_1.* = blocks.#.mlp.fc2.*
Transformer.encoder_norm.* = norm.*
MAPHead_0.probe = attn_pool.latent
MAPHead_0.MultiHeadDotProductAttention_0.query.* = attn_pool.q.*
MAPHead_0.MultiHeadDotProductAttention_0.key.* \
MAPHead_0.MultiHeadDotProductAttention_0.value.* = attn_pool.kv.*
MAPHead_0.MultiHeadDotProductAttention_0.out.* = attn_pool.proj.*
MAPHead_0.LayerNorm_0.* = attn_pool.norm.*
MAPHead_0.MlpBlock_0.Dense_0.* = attn_pool.mlp.fc1.*
MAPHead_0.MlpBlock_0.Dense_1.* = attn_pool.mlp.fc2.*
"""
BLOCK = re.compile(r"(?:blocks\.|layers\.|encoderblock_)(\d+)\.")
POOLING = ("attn_pool.", "head.", "MAPHead_0.")  # the head that pools, which a tower may lack
STACKED = "Transformer/encoderblock/"  # big_vision's, where each array holds all blocks
PATCHES = "embeds.proj.weight"  # (C, side * side * 3)
TABLE = "embeds.pos_embed"  # (1, h, w, C)
CELLS = "embeddings.position_embedding.weight"  # transformers' table, (n * n, C)
HOW_TO_FIT = (
    "--model-kwargs takes the options with which its model was made, e.g. "
    "'pos_embed_grid_size=(24, 24)'"
)


def from_transformers(tower: Tensors, table: tuple[int, int] | None = None) -> Tensors:
    """transformers' Siglip2 tower (names without a prefix) as timm's.

    Args:
        tower: with or without the head that pools.
        table: rows and columns of the position table; without them it is a square.

    Raises:
        Unusable: tensors are missing, or are not Siglip2's (counts and names them); or the table
            has another number of cells.
    """
    result = _renamed(tower, TRANSFORMERS)
    # transformers has the cells in a row, and does not write how many rows and columns they are.
    cells = result[TABLE]
    side = round(len(cells) ** 0.5)
    height, width = table or (side, side)
    if height * width != len(cells):
        raise Unusable(
            f"its position table has {len(cells)} cells, which are not {height} x {width}: give its "
            "rows and columns, e.g. --model-kwargs 'pos_embed_grid_size=(10, 20)'"
        )
    result[TABLE] = cells.reshape(1, height, width, -1)
    return result


def to_transformers(tower: Tensors) -> Tensors:
    """timm's Siglip2 tower as transformers', with or without the head that pools.

    Raises:
        Unusable: tensors are missing, or are not Siglip2's (counts and names them); or the position
            table is no square, as transformers' is.
    """
    result = _renamed(tower, TRANSFORMERS, back=True)
    _, height, width, _ = result[CELLS].shape
    if height != width:
        raise Unusable(
            f"its position table has {height} x {width} cells: transformers' is a square"
        )
    result[CELLS] = result[CELLS].flatten(0, 2)
    return result


def from_big_vision(tower: Tensors) -> tuple[Tensors, int]:
    """Google's image tower (names without a prefix, NumPy arrays) as timm's, and its heads.

    Args:
        tower: each block's arrays under names of their own (``encoderblock_0``), or stacked
            (``encoderblock``), as big_vision's ``scan=True`` makes them.

    Returns:
        The tensors, and how many attention heads they have.

    Raises:
        Unusable: arrays are missing, or are not SigLIP-2's (counts and names them).
    """
    import torch

    flat: dict[str, Any] = {}
    heads = 0
    for name, array in tower.items():
        if name.endswith("query/kernel"):
            heads = array.shape[-2]  # (..., C, heads, C / heads)
        values = torch.from_numpy(array)
        # What belongs to one block, or to none, is a stack of one.
        if not name.startswith(STACKED):
            values = values[None]
        for number, one in enumerate(values):
            # flax has inputs first, and heads on an axis of their own.
            if name.endswith("out/kernel"):
                one = one.flatten(0, 1)  # (heads, C / heads, C)
            if name.endswith("kernel"):
                one = one.flatten(1).t()
            if name.endswith("bias"):
                one = one.flatten()
            written = re.sub("(kernel|scale)$", "weight", name)
            flat[written.replace("block/", f"block_{number}/").replace("/", ".")] = one
    result = _renamed(flat, BIG_VISION)
    result[TABLE] = result[TABLE][None]  # (1, h, w, C)
    return result, heads


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
    if missing or unused:
        raise Unusable(
            f"{len(missing)} tensors of {whose} are not in it {sorted(missing)[:3]}, and {whose} does "
            f"not use {len(unused)} of its tensors {sorted(unused)[:3]}; the file must hold the "
            "state dict of timm's model itself, or SigLIP-2 as transformers, open_clip or Google saves "
            f"it; {HOW_TO_FIT}"
        )
