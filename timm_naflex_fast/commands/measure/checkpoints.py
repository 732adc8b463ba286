"""Local weights in the forms in which people have them, under timm's names.

Two libraries have a SigLIP-2 image tower in PyTorch: timm, whose tower open_clip holds, too; and
transformers. Google's own file timm itself reads.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .tower_names import (
    PATCHES,
    TABLE,
    channels_first,
    count_blocks,
    from_transformers,
    has_pooling,
)
from .weight_files import Tensors, read_tensors

# How the name of each library's patch embedding ends; what stands before it stands before all names
# of the tower. timm's are those of a NaFlexVit and of a ViT; open_clip holds timm's tower.
TRANSFORMERS = "embeddings.patch_embedding.weight"
PATCH_EMBEDDING = re.compile(rf"(.*?)(?:{TRANSFORMERS}|embeds.proj.weight|patch_embed.proj.weight)")
# How PEFT names what it adds to a model, and what it adds to.
ADAPTER = re.compile(r"\.base_layer\.|\b(lora|ia3|hada|lokr|vera|oft|boft)_")
# Attention heads of the published towers, by their channels: no tensor of timm's or transformers'
# tells them.
HEADS = {768: 12, 1152: 16}


def read_checkpoint(file: Path, given: Mapping[str, Any] = {}) -> tuple[Tensors, dict[str, Any]]:
    """Read weights in timm's or transformers' form.

    Args:
        file: as :func:`find_weights` gives it.
        given: timm's options that the user has named, of which ``num_heads`` and
            ``patchify_channels_last`` count.

    Returns:
        The tensors under timm's names; and timm's options for a tower of this size, none for timm's
        own weights.

    Raises:
        ValueError: an adapter of PEFT, or two towers; or one of transformers that lacks tensors or
            has others than Siglip2, counted and named, whose patch embedding is a convolution, or
            whose number of heads is not known. A file that is damaged raises what its reader raises.
    """
    tower = _image_tower(read_tensors(file))
    if TRANSFORMERS not in tower:
        return tower, {}
    if tower[TRANSFORMERS].ndim != 2:
        raise ValueError(
            "a patch embedding that is a convolution: weights of one size, not of NaFlex"
        )
    tower = from_transformers(tower)
    heads = given.get("num_heads") or read_config(file.parent).get("num_attention_heads")
    options = sizes(tower, heads)
    if given.get("patchify_channels_last") is False:
        tower = {**tower, PATCHES: channels_first(tower[PATCHES])}
    return tower, options


def read_config(folder: Path) -> Mapping[str, Any]:
    """transformers' settings of the image tower in ``folder``; empty where there are none.

    Without a number of heads they mean transformers' default: older releases did not write it.
    """
    file = folder / "config.json"
    if not file.is_file():
        return {}
    config = json.loads(file.read_text(encoding="utf-8"))
    config = config.get("vision_config") or config
    if config.get("model_type") != "siglip2_vision_model":
        return {}
    return {"num_attention_heads": 12, **config}


def _image_tower(tensors: Tensors) -> Tensors:
    """The image tower among these tensors, its names without what stands before all of them.

    Raises:
        ValueError: an adapter of PEFT, or several towers.
    """
    adapted = [name for name in tensors if ADAPTER.search(name)]
    if adapted:
        raise ValueError(
            f"an adapter of PEFT, alone or not merged ({', '.join(adapted[:2])}): save what "
            "merge_and_unload() returns"
        )
    found = [match[1] for match in map(PATCH_EMBEDDING.fullmatch, tensors) if match]
    if not found:
        return tensors
    if len(found) > 1:
        raise ValueError(f"{len(found)} image towers in one file ({', '.join(found)})")
    prefix = found[0]
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def sizes(tower: Tensors, heads: int | None = None) -> dict[str, Any]:
    """timm's options for a tower of the size of these tensors; ``heads`` where they are known.

    Raises:
        ValueError: nothing tells how many attention heads the tower has.
    """
    width, pixels = tower[PATCHES].shape
    heads = heads or HEADS.get(width)
    if not heads:
        raise ValueError(
            f"a tower of {width} channels, and nothing that tells how many attention heads it has: "
            "add num_heads to --model-kwargs, e.g. num_heads=12"
        )
    inside = len(tower["blocks.0.mlp.fc1.weight"])
    options = {
        "embed_dim": width,
        "depth": count_blocks(tower),
        "num_heads": heads,
        "patch_size": round((pixels / 3) ** 0.5),
        "pos_embed_grid_size": tuple(tower[TABLE].shape[1:3]),
        # timm multiplies and cuts off what follows the point: half a channel more is no channel.
        "mlp_ratio": (inside + 0.5) / width,
    }
    if not has_pooling(tower):
        options["global_pool"] = ""
    return options
