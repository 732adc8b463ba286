"""From what a user names to tensors: a file, an index of shards, a folder, a name on the hub.

Nothing is fetched, and nothing but tensors is ever read: a pickle can run any code.
"""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .output import printable

Tensors = Mapping[str, Any]  # by their names

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
# Variants ("model.fp16.safetensors", also in shards), and names that somebody else chose; but not
# what a trainer writes beside the weights.
OTHER_NAMES = (
    r".*\.index\..*json",
    r".*\.safetensors",
    r"(?!optimizer|scheduler|scaler|rng_state|training_args).*\.(npz|bin|pth|pt|ckpt|tar)",
)
# Files that people have at hand and that hold no tensors under names that we know.
SOURCE = "give the .safetensors or .pth from which it was made"
OTHER_FORMS = {
    ".gguf": f"has llama.cpp's names and number types (GGUF); {SOURCE}",
    ".onnx": f"is a program of ONNX; {SOURCE}",
    ".h5": f"is a file of Keras; {SOURCE}",
    ".msgpack": f"is a file of flax; {SOURCE}",
    ".npy": "is one NumPy array; give the .npz of Google's release, a .safetensors or a .pth",
    # Beside the weights of transformers lies config.json, which is easily taken for them.
    ".json": "holds no weights; valid: a file of weights, an index of shards (.index.json), or the "
    "folder of either",
}
LFS_POINTER = b"version https://git-lfs"


class Unusable(ValueError):
    """These weights cannot be taken; the text says why, and what to give in their place."""


def find_weights(path: str | Path) -> Path:
    """The file of weights that ``path`` means.

    Args:
        path: the file itself, or an index of shards; a folder that holds one of ``FILES``, or one
            other file of weights; a folder of the hub's cache, or OWNER/NAME of a model in it; or
            a trainer's folder, of which the last ``checkpoint-N`` is taken.

    Raises:
        FileNotFoundError: there is none.
        Unusable: the file is no file of weights, or a folder holds several.
    """
    path = Path(path)
    if path.is_file():
        check_form(path)
        return path
    for folder in _folders(path):
        files = sorted(folder.iterdir())
        for pattern in FILES + OTHER_NAMES:
            found = [file for file in files if re.fullmatch(pattern, file.name, re.IGNORECASE)]
            if len(found) > 1:
                names = ", ".join(printable(file.name) for file in found[:8])
                raise Unusable(f"{folder} holds {len(found)} files of weights: name one of {names}")
            if found:
                return found[0]
    raise FileNotFoundError(
        f"{path} is no file, and no folder with one of {', '.join(FILES)}, and no model in the hub's "
        "cache (`hf download OWNER/NAME` fetches one)"
    )


def _folders(path: Path) -> list[Path]:
    """The folders in which the weights may lie that ``path`` means, in order."""
    if not path.is_dir():
        from huggingface_hub.constants import HF_HUB_CACHE

        path = Path(HF_HUB_CACHE, "models--" + path.as_posix().replace("/", "--"))
    revision = path / "refs" / "main"
    if revision.is_file():
        return [path / "snapshots" / revision.read_text(encoding="utf-8").strip()]
    if not path.is_dir():
        return []
    # The longer a number, the larger it is.
    steps = sorted(path.glob("checkpoint-*[0-9]"), key=lambda step: (len(step.name), step.name))
    return [path, *steps[-1:]]


def check_form(file: Path) -> None:
    """Refuse a file whose name or beginning says that it holds something else.

    Raises:
        Unusable: it does.
    """
    form = OTHER_FORMS.get(file.suffix.lower())
    if _is_index(file):
        form = None
    with open(file, "rb") as opened:
        start = opened.read(len(LFS_POINTER))
    if start == LFS_POINTER:  # what git keeps in place of a large file that was not fetched
        form = "is git-lfs's pointer to the file: run git lfs pull"
    if form:
        raise Unusable(f"{printable(file.name)} {form}")


def _is_index(file: Path) -> bool:
    """Whether a file tells where tensors are, e.g. ``model.safetensors.index.fp16.json``."""
    return ".index." in file.name


def read_tensors(file: Path) -> Tensors:
    """The named tensors of a local file, or of the files that an index names.

    Those of a .npz are NumPy arrays, each read when it is asked for. Of what a trainer saved, the
    first of ``STATES`` is taken. Only tensors are read, whatever timm's release would do.

    Raises:
        Unusable: as :func:`check_form`.
        Exception: whatever a reader says of a file that is not whole, or holds no tensors.
    """
    import numpy as np
    import torch
    from safetensors.torch import load_file

    check_form(file)
    if _is_index(file):
        tensors: dict[str, Any] = {}
        places = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        for name in sorted(set(places.values())):
            tensors |= read_tensors(file.parent / name)
        return tensors
    suffix = file.suffix.lower()
    if suffix == ".npz":
        return np.load(file, allow_pickle=False)
    if suffix == ".safetensors":
        return load_file(file)
    torch.serialization.add_safe_globals([argparse.Namespace])  # the options of timm's train.py
    found = torch.load(file, map_location="cpu", weights_only=True)
    for key in STATES:
        if found.get(key) is not None:
            return found[key]
    return found
