"""SigLIP-2's image tower under the names of three libraries, and in their layouts.

transformers has a projection each for query, key and value; big_vision, in which Google trained the
weights and publishes them, has names and layouts of flax.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from .weight_files import Unusable

Tensors = dict[str, Any]
Pair = tuple[list[str], list[str]]  # names in one library, names in the other

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
TABLE = "embeds.pos_embed"  # (1, h, w, C); transformers' has one row for each cell: (n * n, C)


class NamesDiffer(Unusable):
    """A tower lacks parameters, or has tensors that nothing uses."""


def from_transformers(tower: Mapping[str, Any], table: tuple[int, int] | None = None) -> Tensors:
    """transformers' Siglip2 tower (names without a prefix) as timm's.

    Args:
        tower: with or without the head that pools.
        table: rows and columns of the position table; without them it is a square.

    Raises:
        Unusable: tensors are missing, or are not Siglip2's (counts and names them); its patch
            embedding has another form; or its table has another number of cells.
    """
    result = _renamed(tower, _pairs(tower, TRANSFORMERS))
    _check_linear(result[PATCHES])
    result[TABLE] = _as_grid(result[TABLE], table)
    return result


def _as_grid(cells: Any, table: tuple[int, int] | None = None) -> Any:
    """A table's cells (h * w, C) as timm has them, (1, h, w, C); errors as above."""
    side = round(len(cells) ** 0.5)
    height, width = table or (side, side)
    if height * width != len(cells):
        raise Unusable(
            f"its position table has {len(cells)} cells, which are not {height} x {width}: give its "
            "rows and columns, e.g. --model-kwargs 'pos_embed_grid_size=(10, 20)'"
        )
    return cells.reshape(1, height, width, -1)


def to_transformers(tower: Mapping[str, Any]) -> Tensors:
    """timm's Siglip2 tower as transformers', with or without the head that pools.

    Raises:
        Unusable: tensors are missing, or are not Siglip2's (counts and names them); or the position
            table is no square, as transformers' is.
    """
    flat = dict(tower)
    if TABLE in flat:
        height, width = flat[TABLE].shape[1:3]
        if height != width:
            raise Unusable(
                f"its position table has {height} x {width} cells: transformers' is a square"
            )
        flat[TABLE] = flat[TABLE].flatten(0, 2)  # (1, n, n, C) -> (n * n, C)
    return _renamed(flat, [(ours, theirs) for theirs, ours in _pairs(flat, TRANSFORMERS)])


def from_big_vision(tower: Mapping[str, Any]) -> tuple[Tensors, int]:
    """Google's image tower (names without a prefix, NumPy arrays) as timm's, and its heads.

    Args:
        tower: each block's arrays under names of their own (``encoderblock_0``), or stacked
            (``encoderblock``), as big_vision's ``scan=True`` makes them.

    Returns:
        The tensors, and how many attention heads they have (0 where that is not told).

    Raises:
        Unusable: arrays are missing, or are not SigLIP-2's (counts and names them); or its patch
            embedding has another form.
    """
    flat: Tensors = {}
    heads = 0
    for name, array in tower.items():
        values = _to_torch(array)
        if not name.startswith(STACKED):
            flat |= _flax_parameter(name, values)
            continue
        for number, one in enumerate(values):
            flat |= _flax_parameter(name.replace("block/", f"block_{number}/"), one)
    for name, array in tower.items():
        if name.endswith("query/kernel"):
            heads = array.shape[-2]  # (..., C, heads, C / heads)
    result = _renamed(flat, _pairs(flat, BIG_VISION))
    if len(result[TABLE]) == 1:  # the cells in a row, as in big_vision's other towers
        result[TABLE] = _as_grid(result[TABLE].flatten(0, -2))
    else:
        result[TABLE] = result[TABLE][None]  # (h, w, C)
    return result, heads


def _to_torch(array: Any) -> Any:
    """A NumPy array as a tensor; big_vision saves bfloat16 as two bytes that have no type."""
    import torch

    if array.dtype.kind == "V":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def _flax_parameter(name: str, values: Any) -> Tensors:
    """One of flax's parameters with PyTorch's name and layout."""
    module, _, kind = name.replace("/", ".").rpartition(".")
    if kind == "scale":
        return {f"{module}.weight": values}
    if kind == "bias":
        return {f"{module}.bias": values.flatten()}  # of query, key and value: (heads, C / heads)
    if kind == "kernel" and module == "embedding":
        _check_linear(values)
    if kind == "kernel":
        # Inputs first: (C, D), (C, heads, C / heads); of "out", (heads, C / heads, C).
        if module.endswith(".out"):
            values = values.flatten(0, 1)
        return {f"{module}.weight": values.flatten(1).t()}
    return {name.replace("/", "."): values}


def _check_linear(patch_embedding: Any) -> None:
    if patch_embedding.ndim != 2:
        raise Unusable(
            "its patch embedding is a convolution: weights of one size, not of NaFlex; take "
            "those whose name says naflex, or timm's own weights of this tower, e.g. --model "
            "vit_base_patch16_siglip_256.v2_webli"
        )


def channels_first(tower: Mapping[str, Any]) -> Tensors:
    """A tower whose patches are (y, x, channel), for a model whose patches are (channel, y, x)."""
    weight = tower[PATCHES]
    side = round((weight.shape[1] / 3) ** 0.5)
    pixels = weight.unflatten(1, (side, side, 3)).movedim(3, 1)  # (C, 3, side, side)
    return {**tower, PATCHES: pixels.flatten(1)}


def channels_last(tower: Mapping[str, Any]) -> Tensors:
    """The inverse of :func:`channels_first`."""
    weight = tower[PATCHES]
    side = round((weight.shape[1] / 3) ** 0.5)
    pixels = weight.unflatten(1, (3, side, side)).movedim(1, 3)  # (C, side, side, 3)
    return {**tower, PATCHES: pixels.flatten(1)}


def count_blocks(tower: Mapping[str, Any]) -> int:
    """How many blocks there are, under the names of any of the libraries."""
    numbers = set()
    for name in tower:
        numbers |= set(BLOCK.findall(name))
    return len(numbers)


def has_pooling(tower: Mapping[str, Any]) -> bool:
    """Whether a tower has the head that pools."""
    return any(name.startswith(POOLING) for name in tower)


def _pairs(tower: Mapping[str, Any], mapping: str) -> Iterator[Pair]:
    """A mapping with every name written out, for a tower of as many blocks."""
    pools = has_pooling(tower)
    for line in mapping.strip().splitlines():
        if line.startswith(POOLING) and not pools:
            continue
        blocks = range(count_blocks(tower)) if "#" in line else range(1)
        kinds = ("weight", "bias") if "*" in line else ("",)
        for block in blocks:
            for kind in kinds:
                written = line.replace("#", str(block)).replace("*", kind)
                theirs, ours = written.split(" = ")
                yield theirs.split(), ours.split()


def _renamed(tower: Mapping[str, Any], pairs: Iterable[Pair]) -> Tensors:
    """The tensors under the second names of ``pairs``; every one is used, and every name found."""
    import torch

    pairs = list(pairs)
    needed = {name for names, _ in pairs for name in names}
    check_names("Siglip2's tower", needed - tower.keys(), tower.keys() - needed)
    result: Tensors = {}
    for old, new in pairs:
        whole = torch.cat([tower[name] for name in old])
        # The rows of a query, key and value projection: together, as query and the rest, or each.
        third = len(whole) // 3
        rows = {1: len(whole), 2: [third, 2 * third], 3: third}[len(new)]
        result |= zip(new, whole.split(rows))
    return result


def check_names(whose: str, missing: Collection[str], unused: Collection[str]) -> None:
    """Raise an error that counts and names what is missing from weights, or left over.

    Raises:
        NamesDiffer: there is something.
    """
    if missing or unused:
        raise NamesDiffer(
            f"{len(missing)} tensors of {whose} are not in it {sorted(missing)[:3]}, and {whose} does "
            f"not use {len(unused)} of its tensors {sorted(unused)[:3]}"
        )
