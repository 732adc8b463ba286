"""Local weights in the forms in which people have them, under timm's names.

Three libraries write SigLIP-2's image tower: timm, open_clip (timm's tower inside its own model) and
transformers (other names, and projections cut at other places). Nothing but tensors is ever read: a
pickle can run any code.
"""

import argparse
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .output import printable

Tensors = dict[str, Any]
Pair = tuple[list[str], list[str]]  # names in one library, names in the other

# Where trainers keep the weights in a file, in timm's order.
STATES = ("state_dict_ema", "model_ema", "state_dict", "model")
# What a folder of the hub may hold, in the order in which it is looked for.
FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "open_clip_pytorch_model.bin",
)
TITLES = {"transformers": "transformers' Siglip2", "open_clip": "open_clip's image tower"}
OPEN_CLIP = "visual.trunk."
# How the name of each library's patch embedding ends; what stands before it stands before all names
# of the tower. timm's are those of a NaFlexVit and of a ViT.
PATCH_EMBEDDINGS = {
    "embeddings.patch_embedding.weight": "transformers",
    "embeds.proj.weight": "timm",
    "patch_embed.proj.weight": "timm",
}
LFS_POINTER = b"version https://git-lfs"

# One tower in two libraries: transformers' tensors on the left, put one below the other, are timm's
# on the right. "#" stands for the number of a block, "*" for "weight" and "bias".
MAPPING = """
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
TABLE = "embeds.pos_embed"  # (1, n, n, C); transformers' has one row for each cell: (n * n, C)
# Attention heads of the published towers, by their channels: no tensor tells them.
HEADS = {768: 12, 1152: 16}


class NamesDiffer(ValueError):
    """A checkpoint lacks parameters of the model, or has tensors that the model does not use."""


class Checkpoint(NamedTuple):
    """Weights under timm's names, and what is known about them."""

    tensors: Tensors
    library: str  # that wrote them
    words: str  # what was recognised, in one line
    config: Mapping[str, Any]  # transformers' settings of the image tower, where it wrote them


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read weights in timm's, open_clip's or transformers' form.

    Args:
        path: a file (.safetensors, or a pickle of tensors), an index of shards, or a folder that
            holds one of ``FILES``.

    Raises:
        FileNotFoundError: a file, or a shard that the index names, is not there.
        ValueError: no state dict; two towers; or transformers' tower lacks tensors or has others
            than Siglip2, counted and named.
    """
    tensors: Tensors = {}
    key = ""
    path = find_weights(path)
    for file in shards(path):
        found, key = read_tensors(file)
        tensors |= found
    words = f"file {printable(path.name)}"
    if key:
        words += f" ({key})"
    library, prefix = recognise(tensors)
    tower: Tensors = {}
    left: Counter[str] = Counter()  # of other tensors, by the first word of their names
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            tower[name.removeprefix(prefix)] = tensor
        else:
            left[name.split(".")[0]] += 1
    config: Mapping[str, Any] = {}
    if library == "transformers":
        config = read_config(path.parent)
        tower = to_timm(tower)
    if library != "timm":
        height, width = tower[TABLE].shape[1:3]
        words += f": {TITLES[library]}, {count_blocks(tower)} blocks, table {height} x {width}"
    elif prefix:
        words += f": timm's names after {prefix!r}"
    if left:
        words += f"; left alone: {left.total()} other tensors ({', '.join(left)})"
    return Checkpoint(tower, library, words, config)


def find_weights(path: str | Path) -> Path:
    """The file that ``path`` means: itself, or the first of ``FILES`` in a folder.

    Raises:
        FileNotFoundError: there is none.
    """
    path = Path(path)
    for file in (path, *(path / name for name in FILES)):
        if file.is_file():
            return file
    raise FileNotFoundError(f"{path} is no file, and no folder with one of {', '.join(FILES)}")


def shards(file: Path) -> list[Path]:
    """The files of weights that an index names, each once; or the file alone."""
    if not file.name.endswith(".index.json"):
        return [file]
    places = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    return [file.parent / name for name in sorted(set(places.values()))]


def read_tensors(file: str | Path) -> tuple[Tensors, str]:
    """The named tensors of a local file, and under which key its trainer kept them.

    The key is "" where the file holds nothing else. Only tensors are read, whatever timm's release
    would do: a pickle can run any code.

    Raises:
        ValueError: the file holds something else.
    """
    import torch
    from safetensors.torch import load_file
    from timm.models import clean_state_dict

    with open(file, "rb") as opened:
        start = opened.read(len(LFS_POINTER))
    if start == LFS_POINTER:  # what git keeps in place of a large file that was not fetched
        name = printable(Path(file).name)
        raise ValueError(f"{name} is git-lfs's pointer to the file: run git lfs pull")
    if str(file).endswith(".safetensors"):
        return clean_state_dict(load_file(file)), ""
    _allow_what_trainers_keep()
    found = torch.load(file, map_location="cpu", weights_only=True)
    key = ""
    for name in reversed(STATES):
        if found.get(name) is not None:
            key = name
    state = clean_state_dict(found.get(key, found))
    state.pop("n_averaged", None)  # how many models torch's AveragedModel has averaged
    if not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError("it holds no state dict")
    return state, key


def _allow_what_trainers_keep() -> None:
    """Let torch read, beside tensors, the options of timm's train.py and NumPy's numbers."""
    import numpy as np
    import torch

    numbers = [type(np.dtype(name)) for name in ("int64", "float32", "float64")]
    make_number = np.float64().__reduce__()[0]
    torch.serialization.add_safe_globals([argparse.Namespace, np.dtype, make_number, *numbers])


def read_config(folder: Path) -> Mapping[str, Any]:
    """transformers' settings of the image tower in ``folder``; empty where there are none.

    Without a number of heads they mean transformers' default: older releases did not write it.
    """
    file = folder / "config.json"
    if not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    config = config.get("vision_config", config)
    if config.get("model_type") != "siglip2_vision_model":
        return {}
    return {"num_attention_heads": 12, **config}


def recognise(tensors: Mapping[str, Any]) -> tuple[str, str]:
    """The library whose names these are, and what stands before the names of the image tower.

    Raises:
        ValueError: there are several towers.
    """
    towers: dict[str, str] = {}
    for name in tensors:
        for end, library in PATCH_EMBEDDINGS.items():
            if name.endswith(end):
                towers[name.removesuffix(end)] = library
    if not towers:
        return "timm", ""
    if len(towers) > 1:
        names = ", ".join(sorted(towers))
        raise ValueError(f"it holds {len(towers)} image towers ({names}): save one of them alone")
    ((prefix, library),) = towers.items()
    if prefix == OPEN_CLIP:
        library = "open_clip"
    return library, prefix


def to_timm(tower: Mapping[str, Any]) -> Tensors:
    """transformers' Siglip2 tower (names without a prefix) as timm's.

    Raises:
        ValueError: tensors are missing, or are not Siglip2's (counts and names them), or its patch
            embedding has another form.
    """
    result = _renamed(tower, _pairs(tower))
    if result["embeds.proj.weight"].ndim != 2:
        raise ValueError("its patch embedding is a convolution: weights of one size, not of NaFlex")
    table = result[TABLE]  # (n * n, C)
    side = round(len(table) ** 0.5)
    result[TABLE] = table.reshape(1, side, side, -1)
    return result


def to_transformers(tower: Mapping[str, Any]) -> Tensors:
    """timm's Siglip2 tower as transformers': the inverse of :func:`to_timm`, errors as there."""
    flat = dict(tower)
    if TABLE in flat:
        flat[TABLE] = flat[TABLE].flatten(0, 2)  # (1, n, n, C) -> (n * n, C)
    return _renamed(flat, [(ours, theirs) for theirs, ours in _pairs(tower)])


def count_blocks(tower: Mapping[str, Any]) -> int:
    """How many blocks there are, under timm's names or transformers'."""
    return sum(name.endswith("norm1.weight") for name in tower)


def _pairs(tower: Mapping[str, Any]) -> Iterator[Pair]:
    """``MAPPING`` with every name written out, for a tower of as many blocks."""
    for line in MAPPING.strip().splitlines():
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


def sizes(checkpoint: Checkpoint, heads: int | None = None) -> dict[str, Any]:
    """timm's options for a tower of the size of these tensors; ``heads`` where they are known.

    Raises:
        ValueError: nothing tells how many attention heads the tower has.
    """
    tensors = checkpoint.tensors
    width, pixels = tensors["embeds.proj.weight"].shape
    inside = len(tensors["blocks.0.mlp.fc1.weight"])
    heads = heads or checkpoint.config.get("num_attention_heads", HEADS.get(width))
    if heads is None:
        raise ValueError(f"no tensor tells how many heads {width} channels have: give num_heads")
    return {
        "embed_dim": width,
        "depth": count_blocks(tensors),
        "num_heads": heads,
        "patch_size": round((pixels / 3) ** 0.5),
        "pos_embed_grid_size": tuple(tensors[TABLE].shape[1:3]),
        # timm multiplies and cuts off what follows the point: half a channel more is no channel.
        "mlp_ratio": (inside + 0.5) / width,
    }
