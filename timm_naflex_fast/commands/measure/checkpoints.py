"""Local weights in the forms in which people have them, under timm's names.

Four libraries write SigLIP-2's image tower: timm, open_clip (timm's tower inside its own model),
transformers, and big_vision, in which Google trained it (see ``tower_names``).
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .output import printable
from .tower_names import (
    PATCHES,
    TABLE,
    count_blocks,
    from_big_vision,
    from_transformers,
    has_pooling,
)
from .weight_files import Tensors, Unusable, find_weights, read_tensors

TITLES = {
    "transformers": "transformers' Siglip2",
    "open_clip": "open_clip's image tower",
    "big_vision": "Google's image tower",
}
# How the name of each library's patch embedding ends; what stands before it stands before all names
# of the tower. timm's are those of a NaFlexVit and of a ViT.
PATCH_EMBEDDINGS = {
    "embeddings.patch_embedding.weight": "transformers",
    "embeds.proj.weight": "timm",
    "patch_embed.proj.weight": "timm",
    "embedding/kernel": "big_vision",
}
# big_vision's optimizer has averages of the same names, after "opt/".
PATCH_EMBEDDING = re.compile(rf"(?!opt/)(?P<prefix>.*)({'|'.join(PATCH_EMBEDDINGS)})")
# Attention heads of the published towers, by their channels: no tensor of timm's or transformers'
# tells them.
HEADS = {768: 12, 1152: 16}


class Checkpoint(NamedTuple):
    """Weights under timm's names, and what is known about them."""

    tensors: Tensors
    options: dict[str, Any]  # timm's, for a tower of this size; none for timm's own weights
    words: str  # what was recognised, in one line


def read_checkpoint(path: str | Path, given: Mapping[str, Any] = {}) -> Checkpoint:
    """Read weights in timm's, open_clip's, transformers' or Google's form.

    Args:
        path: as :func:`find_weights` takes it.
        given: timm's options that the user has named. Of them ``num_heads`` counts, and for
            transformers' tower, which does not tell rows and columns, ``pos_embed_grid_size``.

    Raises:
        FileNotFoundError: a file, or a shard that the index names, is not there.
        Unusable: two towers; or a tower of another library lacks tensors or has others than
            Siglip2, counted and named; or its number of heads is not known.
        Exception: as :func:`read_tensors`.
    """
    file = find_weights(path)
    tensors = read_tensors(file)
    library, prefix = _recognise(tensors)
    # Of the other towers in an archive no array is read.
    tower: dict[str, Any] = {}
    for name in tensors:
        if name.startswith(prefix):
            tower[name.removeprefix(prefix)] = tensors[name]
    left = len(tensors) - len(tower)

    named: Tensors = tower
    heads = 0
    if library == "transformers":
        named = from_transformers(tower, given.get("pos_embed_grid_size"))
        heads = read_config(file.parent).get("num_attention_heads", 0)
    elif library == "big_vision":
        named, heads = from_big_vision(tower)

    words = file.name
    # Of a folder: which checkpoint-N, or which revision in the hub's cache.
    if file != Path(path):
        words = f"{file.parent.name}/{words}"
    words = f"file {printable(words)}"
    options: dict[str, Any] = {}
    if library != "timm":
        options = sizes(named, given.get("num_heads", heads))
        height, width = options["pos_embed_grid_size"]
        words += f": {TITLES[library]}, {options['depth']} blocks, table {height} x {width}"
        if "global_pool" in options:
            words += ", no head that pools"
    elif prefix:
        words += f": timm's names after {prefix!r}"
    if left:
        words += f"; left alone: {left} other tensors"
    return Checkpoint(named, options, words)


def read_config(folder: Path) -> Mapping[str, Any]:
    """transformers' settings of the image tower in ``folder``; empty where there are none.

    Without a number of heads they mean transformers' default: older releases did not write it.

    Raises:
        ValueError: config.json is no JSON.
    """
    file = folder / "config.json"
    if not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    config = config.get("vision_config") or config
    if config.get("model_type") != "siglip2_vision_model":
        return {}
    return {"num_attention_heads": 12, **config}


def _recognise(tensors: Tensors) -> tuple[str, str]:
    """The library that wrote them, and what stands before the names of the image tower.

    Raises:
        Unusable: there are several towers, or one of another library whose patch embedding is a
            convolution.
    """
    found = [match for match in map(PATCH_EMBEDDING.fullmatch, tensors) if match]
    if not found:
        return "timm", ""
    if len(found) > 1:
        prefixes = ", ".join(match["prefix"] for match in found)
        raise Unusable(f"it holds {len(found)} image towers ({prefixes}): save one of them alone")
    prefix, end = found[0].groups()
    library = PATCH_EMBEDDINGS[end]
    if prefix + end == "visual.trunk." + PATCHES:
        library = "open_clip"
    if library != "timm" and tensors[prefix + end].ndim != 2:
        raise Unusable(
            "its patch embedding is a convolution: weights of one size, not of NaFlex; take "
            "those whose name says naflex, or timm's own weights of this tower, e.g. --model "
            "vit_base_patch16_siglip_256.v2_webli"
        )
    return library, prefix


def sizes(tensors: Tensors, heads: int = 0) -> dict[str, Any]:
    """timm's options for a tower of the size of these tensors; ``heads`` where they are known.

    Raises:
        Unusable: nothing tells how many attention heads the tower has, or they do not divide its
            channels.
    """
    width, pixels = tensors[PATCHES].shape
    inside = len(tensors["blocks.0.mlp.fc1.weight"])
    heads = heads or HEADS.get(width, 0)
    if not heads or width % heads:
        raise Unusable(
            f"{width} channels cannot be divided among {heads!r} heads, and no tensor tells how many "
            "there are: give num_heads; add it to --model-kwargs, e.g. num_heads=12"
        )
    options = {
        "embed_dim": width,
        "depth": count_blocks(tensors),
        "num_heads": heads,
        "patch_size": round((pixels / 3) ** 0.5),
        "pos_embed_grid_size": tuple(tensors[TABLE].shape[1:3]),
        # timm multiplies and cuts off what follows the point: half a channel more is no channel.
        "mlp_ratio": (inside + 0.5) / width,
    }
    if not has_pooling(tensors):
        options["global_pool"] = ""
    return options
