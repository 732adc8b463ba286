"""Local weights in the forms in which people have them, under timm's names.

Four libraries write SigLIP-2's image tower: timm, open_clip (timm's tower inside its own model),
transformers, and big_vision, in which Google trained it (see ``tower_names``).
"""

import re
from collections import ChainMap, Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .output import printable
from .tower_names import (
    TABLE,
    Tensors,
    count_blocks,
    from_big_vision,
    from_transformers,
    has_pooling,
)
from .weight_files import (
    GOOGLES_PATCH_EMBEDDING,
    Unusable,
    find_weights,
    read_json,
    read_tensors,
    shards,
)

TITLES = {
    "transformers": "transformers' Siglip2",
    "open_clip": "open_clip's image tower",
    "big_vision": "Google's image tower",
}
OPEN_CLIP = "visual.trunk."
# How the name of each library's patch embedding ends; what stands before it stands before all names
# of the tower. timm's are those of a NaFlexVit and of a ViT.
PATCH_EMBEDDINGS = {
    "embeddings.patch_embedding.weight": "transformers",
    "embeds.proj.weight": "timm",
    "patch_embed.proj.weight": "timm",
    GOOGLES_PATCH_EMBEDDING: "big_vision",
}
OPTIMIZER = "opt/"  # big_vision's, whose averages have the same names as the weights
# Attention heads of the published towers, by their channels: no tensor of timm's or transformers'
# tells them.
HEADS = {768: 12, 1152: 16}


class Checkpoint(NamedTuple):
    """Weights under timm's names, and what is known about them."""

    tensors: Tensors
    library: str  # that wrote them
    words: str  # what was recognised, in one line
    config: Mapping[str, Any]  # settings of the image tower, in transformers' words


def read_checkpoint(path: str | Path, table: tuple[int, int] | None = None) -> Checkpoint:
    """Read weights in timm's, open_clip's, transformers' or Google's form.

    Args:
        path: as :func:`find_weights` takes it.
        table: rows and columns of the position table, for transformers' tower, which does not tell
            them where they differ.

    Raises:
        FileNotFoundError: a file, or a shard that the index names, is not there.
        Unusable: two towers; or a tower of another library lacks tensors or has others than
            Siglip2, counted and named.
        ValueError: no state dict.
    """
    path = Path(path)
    weights = find_weights(path)
    key = ""
    parts = []
    for file in shards(weights):
        found, key = read_tensors(file)
        parts.append(found)
    tensors: Mapping[str, Any] = ChainMap(*parts)  # type: ignore[arg-type]
    library, prefix = recognise(tensors)

    # Of the other towers in an archive no array is read.
    tower: Tensors = {}
    left: Counter[str] = Counter()  # of other tensors, by the first word of their names
    for name in tensors:
        if name.startswith(prefix):
            tower[name.removeprefix(prefix)] = tensors[name]
        else:
            left[re.split("[./]", name.removeprefix("params/"))[0]] += 1

    config: Mapping[str, Any] = {}
    if library == "transformers":
        config = read_config(weights.parent)
        tower = from_transformers(tower, table)
    elif library == "big_vision":
        tower, heads = from_big_vision(tower)
        config = {"num_attention_heads": heads}

    words = f"file {printable(_shown(path, weights))}"
    if key:
        words += f" ({key})"
    if library != "timm":
        words += f": {TITLES[library]}, {_described(tower)}"
    elif prefix:
        words += f": timm's names after {prefix!r}"
    if left:
        words += f"; left alone: {left.total()} other tensors ({', '.join(left)})"
    return Checkpoint(tower, library, words, config)


def _described(tower: Tensors) -> str:
    """The size of a tower under timm's names, in words."""
    height, width = tower[TABLE].shape[1:3]
    words = f"{count_blocks(tower)} blocks, table {height} x {width}"
    if not has_pooling(tower):
        words += ", no head that pools"
    return words


def _shown(path: Path, weights: Path) -> Path:
    """The file of weights as a report names it: from what the user named on."""
    if weights.is_relative_to(path.parent):
        return weights.relative_to(path.parent)
    return path / weights.name  # in the hub's cache


def read_config(folder: Path) -> Mapping[str, Any]:
    """transformers' settings of the image tower in ``folder``; empty where there are none.

    Without a number of heads they mean transformers' default: older releases did not write it.

    Raises:
        Unusable: config.json is no JSON object.
    """
    file = folder / "config.json"
    if not file.is_file():
        return {}
    config = read_json(file)
    config = config.get("vision_config") or config
    if config.get("model_type") != "siglip2_vision_model":
        return {}
    return {"num_attention_heads": 12, **config}


def recognise(names: Iterable[str]) -> tuple[str, str]:
    """The library whose names these are, and what stands before the names of the image tower.

    Raises:
        Unusable: there are several towers.
    """
    towers: dict[str, str] = {}
    for name in names:
        for end, library in PATCH_EMBEDDINGS.items():
            if name.endswith(end) and not name.startswith(OPTIMIZER):
                towers[name.removesuffix(end)] = library
    if not towers:
        return "timm", ""
    if len(towers) > 1:
        found = ", ".join(sorted(towers))
        raise Unusable(f"it holds {len(towers)} image towers ({found}): save one of them alone")
    ((prefix, library),) = towers.items()
    if prefix == OPEN_CLIP:
        library = "open_clip"
    return library, prefix


def sizes(checkpoint: Checkpoint, heads: int | None = None) -> dict[str, Any]:
    """timm's options for a tower of the size of these tensors; ``heads`` where they are known.

    Raises:
        Unusable: nothing tells how many attention heads the tower has, or they do not divide its
            channels.
    """
    tensors = checkpoint.tensors
    width, pixels = tensors["embeds.proj.weight"].shape
    inside = len(tensors["blocks.0.mlp.fc1.weight"])
    if heads is None:
        heads = checkpoint.config.get("num_attention_heads", HEADS.get(width))
    if heads is None:
        raise Unusable(
            f"no tensor tells how many heads {width} channels have: give num_heads; add it to "
            "--model-kwargs, e.g. num_heads=12"
        )
    if not isinstance(heads, int) or heads < 1 or width % heads:
        raise Unusable(
            f"{width} channels cannot be divided among {heads!r} heads: config.json is that of other "
            "weights, or --model-kwargs num_heads=N is wrong"
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
