"""Local weights in the forms in which people have them, under timm's names.

Three libraries write SigLIP-2's image tower: timm, open_clip (timm's tower inside its own model) and
transformers (other names, and projections cut at other places). Nothing but tensors is ever read: a
pickle can run any code.
"""

import argparse
import json
import re
from collections.abc import Iterable, Iterator, Mapping
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
PATCH_EMBEDDING = "embeddings.patch_embedding.weight"
# timm's own patch embedding, of a NaFlexVit and of a ViT: a name before it is a trainer's.
TIMM_PATCH_EMBEDDINGS = ("embeds.proj.weight", "patch_embed.proj.weight")
LFS_POINTER = b"version https://git-lfs"

# One tower in two libraries: transformers' tensors on the left, put one below the other, are timm's
# on the right. "#" stands for the number of a block, "*" for "weight" and "bias".
PAIRS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("embeddings.patch_embedding.*",), ("embeds.proj.*",)),
    (("embeddings.position_embedding.weight",), ("embeds.pos_embed",)),
    (("encoder.layers.#.layer_norm1.*",), ("blocks.#.norm1.*",)),
    (
        (
            "encoder.layers.#.self_attn.q_proj.*",
            "encoder.layers.#.self_attn.k_proj.*",
            "encoder.layers.#.self_attn.v_proj.*",
        ),
        ("blocks.#.attn.qkv.*",),
    ),
    (("encoder.layers.#.self_attn.out_proj.*",), ("blocks.#.attn.proj.*",)),
    (("encoder.layers.#.layer_norm2.*",), ("blocks.#.norm2.*",)),
    (("encoder.layers.#.mlp.fc1.*",), ("blocks.#.mlp.fc1.*",)),
    (("encoder.layers.#.mlp.fc2.*",), ("blocks.#.mlp.fc2.*",)),
    (("post_layernorm.*",), ("norm.*",)),
    (("head.probe",), ("attn_pool.latent",)),
    (("head.attention.in_proj_*",), ("attn_pool.q.*", "attn_pool.kv.*")),
    (("head.attention.out_proj.*",), ("attn_pool.proj.*",)),
    (("head.layernorm.*",), ("attn_pool.norm.*",)),
    (("head.mlp.fc1.*",), ("attn_pool.mlp.fc1.*",)),
    (("head.mlp.fc2.*",), ("attn_pool.mlp.fc2.*",)),
)
TABLE = "embeds.pos_embed"  # (1, n, n, C); transformers' has one row for each cell: (n * n, C)
# The tensors whose shapes tell the size of a tower: patch embedding, a block's MLP, table.
SIZED_BY = ("embeds.proj.weight", "blocks.0.mlp.fc1.weight", TABLE)
# Attention heads of the published towers, by their channels: no tensor tells them.
HEADS = {768: 12, 1152: 16}


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
    tower, left = _tower_apart(tensors, prefix)
    config: Mapping[str, Any] = {}
    if library == "transformers":
        config = read_config(path.parent)
        tower = to_timm(tower)
    if library != "timm":
        words += f": {TITLES[library]}{describe(tower)}"
    elif prefix:
        words += f": timm's names after {prefix!r}"
    if left:
        rooms = dict.fromkeys(name.split(".")[0] for name in left)
        words += f"; left alone: {len(left)} other tensors ({', '.join(rooms)})"
    return Checkpoint(tower, library, words, config)


def _tower_apart(tensors: Tensors, prefix: str) -> tuple[Tensors, list[str]]:
    """The image tower without what stands before its names, and the names of all else."""
    tower: Tensors = {}
    left: list[str] = []
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            tower[name.removeprefix(prefix)] = tensor
        else:
            left.append(name)
    return tower, left


def find_weights(path: str | Path) -> Path:
    """The file that ``path`` means: itself, or the first of ``FILES`` in a folder.

    Raises:
        FileNotFoundError: there is none.
    """
    path = Path(path)
    if not path.is_dir():
        return path
    for name in FILES:
        if (path / name).is_file():
            return path / name
    raise FileNotFoundError(f"the folder {path} holds no weights; looked for {', '.join(FILES)}")


def shards(file: Path) -> list[Path]:
    """The files of weights that an index names, each once; or the file alone."""
    if not file.name.endswith(".index.json"):
        return [file]
    _refuse_pointer(file)
    places = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    return [file.parent / name for name in sorted(set(places.values()))]


def _refuse_pointer(file: str | Path) -> None:
    """What git keeps in place of a large file that was not fetched is a few lines of text.

    Raises:
        ValueError: the file is that.
    """
    with open(file, "rb") as opened:
        start = opened.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        name = printable(Path(file).name)
        raise ValueError(f"{name} is git-lfs's pointer to the file: run git lfs pull")


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

    _refuse_pointer(file)
    if str(file).endswith(".safetensors"):
        return clean_state_dict(load_file(file)), ""
    _allow_what_trainers_keep()
    found = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(found, dict):
        raise ValueError("it holds no state dict")
    state, key = found, ""
    for name in STATES:
        if found.get(name) is not None:
            state, key = found[name], name
            break
    state = clean_state_dict(state)
    state.pop("n_averaged", None)  # how many models torch's AveragedModel has averaged
    if not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError("it holds no state dict")
    return state, key


def _allow_what_trainers_keep() -> None:
    """Let torch read, beside tensors, the options of timm's train.py and NumPy's numbers."""
    import numpy as np
    import torch

    codes = np.typecodes["AllInteger"] + np.typecodes["Float"]
    numbers = [type(np.dtype(code)) for code in codes]
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
        ValueError: there are several towers of transformers.
    """
    towers = []
    for name in tensors:
        if name.startswith(OPEN_CLIP):
            return "open_clip", OPEN_CLIP
        if name.endswith(PATCH_EMBEDDING):
            towers.append(name.removesuffix(PATCH_EMBEDDING))
    if len(towers) > 1:
        names = ", ".join(sorted(towers))
        raise ValueError(f"it holds {len(towers)} image towers ({names}): save one of them alone")
    if towers:
        return "transformers", towers[0]
    for name in tensors:
        for own in TIMM_PATCH_EMBEDDINGS:
            if name.endswith(own):
                return "timm", name.removesuffix(own)
    return "timm", ""


def to_timm(tower: Mapping[str, Any]) -> Tensors:
    """transformers' Siglip2 tower (names without a prefix) as timm's.

    Raises:
        ValueError: tensors are missing, or are not Siglip2's (counts and names them); or a patch
            embedding or a table of another form.
    """
    result = _renamed(tower, _pairs(count_blocks(tower, "encoder.layers.")))
    if result["embeds.proj.weight"].ndim != 2:
        raise ValueError("its patch embedding is a convolution: weights of one size, not of NaFlex")
    table = result[TABLE]  # (n * n, C)
    side = round(len(table) ** 0.5)
    if side * side != len(table):
        raise ValueError(f"its position table of {len(table)} cells is no square")
    result[TABLE] = table.reshape(1, side, side, -1)
    return result


def to_transformers(tower: Mapping[str, Any]) -> Tensors:
    """timm's Siglip2 tower as transformers': the inverse of :func:`to_timm`, errors as there."""
    pairs = [(ours, theirs) for theirs, ours in _pairs(count_blocks(tower, "blocks."))]
    flat = dict(tower)
    if TABLE in flat:
        flat[TABLE] = flat[TABLE].flatten(0, 2)  # (1, n, n, C) -> (n * n, C)
    return _renamed(flat, pairs)


def count_blocks(tower: Mapping[str, Any], before: str) -> int:
    """One more than the largest number of a block, which stands after ``before`` in a name."""
    numbers = [0]
    for name in tower:
        found = re.match(re.escape(before) + r"(\d+)\.", name)
        if found:
            numbers.append(int(found[1]) + 1)
    return max(numbers)


def _pairs(depth: int) -> Iterator[Pair]:
    """``PAIRS`` with every name written out, for a tower of ``depth`` blocks."""
    for theirs, ours in PAIRS:
        blocks = range(depth) if "#" in theirs[0] else range(1)
        kinds = ("weight", "bias") if "*" in theirs[0] else ("",)
        for block in blocks:
            for kind in kinds:
                yield _written_out(theirs, block, kind), _written_out(ours, block, kind)


def _written_out(names: tuple[str, ...], block: int, kind: str) -> list[str]:
    return [name.replace("#", str(block)).replace("*", kind) for name in names]


def _renamed(tower: Mapping[str, Any], pairs: Iterable[Pair]) -> Tensors:
    """The tensors under the second names of ``pairs``; every one is used, and every name found."""
    import torch

    pairs = list(pairs)
    needed: list[str] = []
    for old, _ in pairs:
        needed += old
    _check_names(needed, tower)
    result: Tensors = {}
    for old, new in pairs:
        whole = torch.cat([tower[name] for name in old])
        result |= zip(new, _cut(whole, len(new)))
    return result


def _check_names(needed: list[str], tower: Mapping[str, Any]) -> None:
    missing = [name for name in needed if name not in tower]
    unknown = sorted(tower.keys() - set(needed))
    wrong = []
    if missing:
        wrong.append(f"{len(missing)} tensors not in it ({', '.join(missing[:3])})")
    if unknown:
        wrong.append(f"{len(unknown)} tensors that are not its own ({', '.join(unknown[:3])})")
    if wrong:
        raise ValueError(f"no whole Siglip2 tower: {'; '.join(wrong)}")


def _cut(whole: Any, count: int) -> tuple[Any, ...]:
    """The rows of a query, key and value projection: together, as query and the rest, or each."""
    if count == 1:
        return (whole,)
    third = len(whole) // 3
    sizes = [third, 2 * third] if count == 2 else [third] * 3
    return whole.split(sizes)


def describe(tower: Mapping[str, Any]) -> str:
    """Depth and table of a tower under timm's names, in words that follow its library's name."""
    words = f", {count_blocks(tower, 'blocks.')} blocks"
    if TABLE in tower:
        words += f", table {tower[TABLE].shape[1]} x {tower[TABLE].shape[2]}"
    return words


def sizes(checkpoint: Checkpoint, heads: int | None = None) -> dict[str, Any]:
    """timm's options for a tower of the size of these tensors; ``heads`` where they are known.

    Raises:
        ValueError: a tensor that tells a size is missing, or nothing tells how many attention heads
            the tower has.
    """
    tensors = checkpoint.tensors
    for name in SIZED_BY:
        if name not in tensors:
            raise ValueError(f"the tower lacks {name}")
    projection, first_layer, table = (tensors[name] for name in SIZED_BY)
    width, pixels = projection.shape
    inside = first_layer.shape[0]
    heads = heads or checkpoint.config.get("num_attention_heads", HEADS.get(width))
    if heads is None:
        raise ValueError(f"no tensor tells how many heads {width} channels have: give num_heads")
    return {
        "embed_dim": width,
        "depth": count_blocks(tensors, "blocks."),
        "num_heads": heads,
        "patch_size": round((pixels / 3) ** 0.5),
        "pos_embed_grid_size": tuple(table.shape[1:3]),
        # timm multiplies and cuts off what follows the point: half a channel more is no channel.
        "mlp_ratio": (inside + 0.5) / width,
    }
