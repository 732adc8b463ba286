"""From what a user names to tensors: a file, an index of shards, a folder, a name on the hub.

Nothing is fetched, and nothing but tensors is ever read: a pickle can run any code.
"""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .output import one_line, printable

Tensors = Mapping[str, Any]  # by their names

# What a folder of the hub may hold, in the order in which it is looked for.
FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "open_clip_model.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "open_clip_pytorch_model.bin",
)
# Variants ("model.fp16.safetensors", also in shards), and names that somebody else chose; but not
# what a trainer writes beside the weights.
OTHER_NAMES = (
    r".*\.index\..*json",
    r".*\.safetensors",
    r"(?!optimizer|scheduler|scaler|rng_state|training_args).*\.(npz|bin|pth|pt|ckpt|tar)",
)
SHARD = re.compile(r".*-\d+-of-0*([2-9]|[1-9]\d+)\.\w+")
SHOWN = 8  # names in an error
TAKEN = (
    "taken are timm's own weights, and SigLIP-2's NaFlex image tower as transformers, open_clip or "
    "Google saves it: a file (.safetensors, .pth, .bin, .npz), an index of shards (.index.json), a "
    "folder with one of these, or OWNER/NAME of a model in the hub's cache"
)

HOW_TO_FIT = (
    "--model-kwargs takes the options with which its model was made, e.g. "
    "'pos_embed_grid_size=(24, 24)'"
)


class Unusable(ValueError):
    """These weights cannot be taken; the text says what was found, and what is taken."""

    def __init__(self, found: str, taken: str = TAKEN) -> None:
        super().__init__(f"found {found}; {taken}")


def find_weights(path: str | Path) -> Path:
    """The file of weights that ``path`` means.

    Args:
        path: the file itself, or an index of shards; a folder that holds one of ``FILES``, or one
            other file of weights; a folder of the hub's cache, or OWNER/NAME of a model in it.

    Raises:
        Unusable: there is none, or several, or it is one of several shards.
    """
    named = Path(path)
    if not named.exists():
        from huggingface_hub.constants import HF_HUB_CACHE

        named = Path(HF_HUB_CACHE, "models--" + named.as_posix().replace("/", "--"))
    if named.is_dir():
        return _file_of(named)
    if not named.is_file():
        raise Unusable(f"no file or folder {path}, and no such model in the hub's cache")
    if SHARD.fullmatch(named.name):
        raise Unusable(f"{printable(named.name)}, which is one of several shards, not their index")
    return named


def _file_of(folder: Path) -> Path:
    """The one file of weights in a folder, which may be a model's in the hub's cache."""
    # The cache has a folder for each revision, and may say which one is "main".
    main = folder / "refs" / "main"
    if main.is_file():
        folder = folder / "snapshots" / main.read_text(encoding="utf-8").strip()
    files = sorted([*folder.glob("*.*"), *folder.glob("snapshots/*/*.*")])
    for pattern in FILES + OTHER_NAMES:
        found = [file for file in files if re.fullmatch(pattern, file.name, re.IGNORECASE)]
        if len(found) == 1 and not SHARD.fullmatch(found[0].name):
            return found[0]
        if found:
            what = (
                "shards without an index" if SHARD.fullmatch(found[0].name) else "files of weights"
            )
            shown = ", ".join(str(file.relative_to(folder)) for file in found[:SHOWN])
            raise Unusable(
                f"{len(found)} {what} in the folder {folder} ({printable(shown)}), not one"
            )
    raise Unusable(f"no weights in the folder {folder}")


def _is_index(file: Path) -> bool:
    """Whether a file tells where tensors are, e.g. ``model.safetensors.index.fp16.json``."""
    return ".index." in file.name


def read_tensors(file: Path) -> Tensors:
    """The named tensors of a local file, or of the files that an index names.

    Those of a .npz are NumPy arrays, each read when it is asked for. Of what a trainer saved, timm
    chooses: averaged weights come first.

    Raises:
        Unusable: it is not whole, or holds other things than named tensors; says what its reader
            says.
    """
    try:
        if not _is_index(file):
            return _read(file)
        tensors: dict[str, Any] = {}
        places = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        for name in sorted(set(places.values())):
            tensors |= _read(file.parent / name)
        return tensors
    # A cut-off file, a pickle of something else: each reader has errors of its own.
    except Exception as error:
        text = one_line(error)
        if "weights_only" in text:  # torch and timm go on with unsafe advice
            text = "it holds other things than tensors, or is damaged"
        raise Unusable(f"{printable(file.name)}, which cannot be read: {text}") from error


def _read(file: Path) -> Tensors:
    """The named tensors of one file."""
    import numpy as np
    import torch
    from safetensors.torch import load_file
    from timm.models import load_state_dict

    suffix = file.suffix.lower()
    if suffix == ".npz":
        return np.load(file, allow_pickle=False)
    if suffix == ".safetensors":
        return load_file(file)
    # What timm's train.py writes holds its options; timm 1.0.16 does not allow them.
    torch.serialization.add_safe_globals([argparse.Namespace])
    return load_state_dict(str(file), weights_only=True)
