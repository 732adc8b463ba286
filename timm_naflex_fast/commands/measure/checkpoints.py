"""Local weights in the forms in which people have them, under timm's names.

Four libraries write SigLIP-2's image tower: timm, open_clip (timm's tower inside its own model),
transformers, and big_vision, in which Google trained it. timm itself reads Google's.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .output import one_line, printable
from .tower_names import (
    PATCHES,
    TABLE,
    channels_first,
    check_names,
    count_blocks,
    from_transformers,
    has_pooling,
    outline_of_big_vision,
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
READS_BIG_VISION = (1, 0, 31)  # timm's release


class Checkpoint(NamedTuple):
    """Weights of a file, and what is known about them."""

    file: Path
    library: str  # that wrote them: "timm", or one of ``TITLES``
    tensors: Tensors  # under timm's names; big_vision's under its own
    options: dict[str, Any]  # timm's, for a tower of this size; none for timm's own weights
    words: str  # what was recognised, in one line

    @property
    def classes(self) -> int:
        """How many classes the head has; 0 where there is none."""
        return len(self.tensors.get("head.weight", ()))

    def fill(self, model: Any) -> None:
        """Put the weights into a NaFlexVit, by timm's own loaders.

        Raises:
            Unusable: tensors are missing (but those of a head of another number of classes), or are
                not the model's; counts and names them.
            Exception: timm cannot read or convert them.
        """
        import timm
        from timm.models import load_pretrained

        if self.library == "big_vision":
            if tuple(map(int, timm.__version__.split(".")[:3])) < READS_BIG_VISION:
                raise Unusable(
                    f"Google's own file, which timm {timm.__version__} does not read: 1.0.31 does"
                )
            model.load_pretrained(str(self.file))
            return
        tensors = dict(self.tensors)
        if self.library != "timm" and not getattr(model.embeds, "channels_last", True):
            tensors[PATCHES] = channels_first(tensors[PATCHES])
        source = {"state_dict": tensors, "num_classes": self.classes}
        load_pretrained(
            model,
            {**model.pretrained_cfg, **source},
            num_classes=model.num_classes,
            in_chans=model.embeds.in_chans,
            filter_fn=self._converted,
        )

    def _converted(self, tensors: dict[str, Any], model: Any) -> dict[str, Any]:
        """The tensors as timm converts them to a model's names; all of them fit those."""
        from timm.models.naflexvit import checkpoint_filter_fn

        converted = checkpoint_filter_fn(tensors, model)
        # Where the head is new, timm leaves that of the file out, and no longer asks for the rest.
        differing = model.state_dict().keys() ^ converted.keys()
        if model.num_classes != self.classes:
            differing = {name for name in differing if not name.startswith("head.")}
        check_names("the model", differing - converted.keys(), differing & converted.keys())
        return converted


def read_checkpoint(path: str | Path, given: Mapping[str, Any] = {}) -> Checkpoint:
    """Read weights in timm's, open_clip's, transformers' or Google's form.

    Args:
        path: as :func:`find_weights` takes it.
        given: timm's options that the user has named. Of them ``num_heads`` counts.

    Raises:
        Unusable: as :func:`find_weights` and :func:`read_tensors`; or it holds two towers, or one of
            another library that lacks tensors or has others than Siglip2, counted and named; or its
            number of heads is not known.
    """
    file = find_weights(path)
    tensors = read_tensors(file)
    library, prefix = _recognise(tensors)
    # Of the other towers in an archive no array is read.
    names = [name for name in tensors if name.startswith(prefix)]
    tower: Tensors = {name.removeprefix(prefix): tensors[name] for name in names}
    left = len(tensors) - len(tower)

    heads = 0
    outline: Tensors = tower
    if library == "transformers":
        outline = tower = from_transformers(tower)
        heads = read_config(file.parent).get("num_attention_heads", 0)
    elif library == "big_vision":
        outline, heads = outline_of_big_vision(tower)
    options: dict[str, Any] = {}
    if library != "timm":
        options = sizes(outline, given.get("num_heads", heads))

    words = file.name
    # Of a folder: which revision in the hub's cache.
    if file != Path(path):
        words = f"{file.parent.name}/{words}"
    words = f"file {printable(words)}"
    if options:
        height, width = options["pos_embed_grid_size"]
        words += f": {TITLES[library]}, {options['depth']} blocks, table {height} x {width}"
        if "global_pool" in options:
            words += ", no head that pools"
    elif prefix:
        words += f": timm's names after {prefix!r}"
    if left:
        words += f"; left alone: {left} other tensors"
    return Checkpoint(file, library, tower, options, words)


def read_config(folder: Path) -> Mapping[str, Any]:
    """transformers' settings of the image tower in ``folder``; empty where there are none.

    Without a number of heads they mean transformers' default: older releases did not write it.

    Raises:
        Unusable: config.json cannot be read, or holds no settings; names it.
    """
    file = folder / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        config = config.get("vision_config") or config
        if config.get("model_type") != "siglip2_vision_model":
            return {}
    except (ValueError, AttributeError) as error:  # no UTF-8, no JSON, a list
        raise Unusable(
            f"beside the weights {printable(file)}, which cannot be read: {one_line(error)}",
            "taken is the config.json that transformers wrote, or none",
        ) from error
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
        raise Unusable(f"{len(found)} image towers in one file ({prefixes})")
    prefix, end = found[0].groups()
    library = PATCH_EMBEDDINGS[end]
    if prefix + end == "visual.trunk." + PATCHES:
        library = "open_clip"
    if library != "timm" and tensors[prefix + end].ndim != 2:
        raise Unusable(
            "a patch embedding that is a convolution: weights of one size, not of NaFlex"
        )
    return library, prefix


def sizes(tower: Tensors, heads: int = 0) -> dict[str, Any]:
    """timm's options for a tower of the size of these tensors; ``heads`` where they are known.

    Raises:
        Unusable: nothing tells how many attention heads the tower has, or they do not divide its
            channels.
    """
    width, pixels = tower[PATCHES].shape
    inside = len(tower["blocks.0.mlp.fc1.weight"])
    heads = heads or HEADS.get(width, 0)
    if not isinstance(heads, int) or heads < 1 or width % heads:
        raise Unusable(
            f"{width} channels, which cannot be divided among {heads!r} heads, and no tensor that "
            "tells how many there are",
            "give num_heads: add it to --model-kwargs, e.g. num_heads=12",
        )
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
