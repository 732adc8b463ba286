"""From what a user names to tensors: a file, an index of shards, a folder, a name on the hub.

Nothing is fetched, and nothing but tensors is ever read: a pickle can run any code.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from .output import printable

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
# How files of weights end that are no .safetensors, and how those begin that a trainer writes beside
# them.
SUFFIXES = (".npz", ".bin", ".pth", ".pt", ".ckpt", ".tar")
BESIDE = ("optimizer", "scheduler", "scaler", "rng_state", "training_args")
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
GOOGLES_PATCH_EMBEDDING = "embedding/kernel"


class Unusable(ValueError):
    """These weights cannot be taken; the text says why, and what to give in their place."""


def find_weights(path: str | Path) -> Path:
    """The file of weights that ``path`` means.

    Args:
        path: the file itself, or an index of shards; a folder that holds one of ``FILES``, or one
            other file of weights; such a folder's parent, as the hub's cache and trainers have it
            (the newest snapshot, the last ``checkpoint-N``); or OWNER/NAME of a model on the hub,
            which is looked for in the hub's cache.

    Raises:
        FileNotFoundError: there is none.
        Unusable: the file is no file of weights, or a folder holds several.
    """
    path = Path(path)
    if path.is_file():
        _check_form(path)
        return path
    folders = _folders(path)
    for folder in folders:
        found = _weights_in(folder)
        if found is not None:
            _check_form(found)
            return found
    message = f"{path} is no file, and no folder with one of {', '.join(FILES)}"
    if folders:
        held = sorted(file.name for file in folders[0].iterdir())
        message += f"; it holds {', '.join(map(printable, held[:8])) or 'nothing'}"
    elif _is_hub_name(path):
        message += f"; if it is a model on the hub, `hf download {path}` fetches it"
    raise FileNotFoundError(message)


def _check_form(file: Path) -> None:
    """Refuse a file whose name or beginning says that it holds something else.

    Raises:
        Unusable: it does.
    """
    form = OTHER_FORMS.get(file.suffix.lower())
    if form and not _is_index(file):
        raise Unusable(f"{printable(file.name)} {form}")
    with open(file, "rb") as opened:
        start = opened.read(len(LFS_POINTER))
    if start == LFS_POINTER:  # what git keeps in place of a large file that was not fetched
        name = printable(file.name)
        raise Unusable(f"{name} is git-lfs's pointer to the file: run git lfs pull")


def _folders(path: Path) -> list[Path]:
    """The folders in which the weights may lie that ``path`` means, in order."""
    if not path.is_dir() and _is_hub_name(path):
        from huggingface_hub.constants import HF_HUB_CACHE

        path = Path(HF_HUB_CACHE, f"models--{path.parent}--{path.name}")
    if not path.is_dir():
        return []
    return [path, *_snapshots(path)[-1:], *_steps(path)[-1:]]


def _is_hub_name(path: Path) -> bool:
    """Whether this may be OWNER/NAME of a model on the hub."""
    return len(path.parts) == 2 and not path.is_absolute() and ".." not in path.parts


def _snapshots(root: Path) -> list[Path]:
    """The revisions of a model in the hub's cache; the newest, or that of the branch main, last."""
    snapshots = [folder for folder in root.glob("snapshots/*") if folder.is_dir()]
    snapshots.sort(key=lambda folder: folder.stat().st_mtime)
    main = root / "refs" / "main"
    if main.is_file():
        revision = main.read_text(encoding="utf-8").strip()
        snapshots.sort(key=lambda folder: folder.name == revision)
    return snapshots


def _steps(folder: Path) -> list[Path]:
    """What a trainer saved: its folders ``checkpoint-N``, the last step last."""
    steps = {}
    for saved in folder.glob("checkpoint-*"):
        step = saved.name.removeprefix("checkpoint-")
        if step.isdecimal() and saved.is_dir():
            steps[int(step)] = saved
    return [steps[step] for step in sorted(steps)]


def _weights_in(folder: Path) -> Path | None:
    """The file of weights in a folder; None where there is none.

    Raises:
        Unusable: there are several, and no name says which one to take.
    """
    for name in FILES:
        if (folder / name).is_file():
            return folder / name
    # Variants ("model.fp16.safetensors", also in shards), and names that somebody else chose.
    files = sorted(folder.iterdir())
    for is_one in (_is_index, _is_safetensors, _is_other):
        found = [file for file in files if is_one(file)]
        if len(found) > 1:
            names = ", ".join(printable(file.name) for file in found[:8])
            raise Unusable(f"{folder} holds {len(found)} files of weights: name one of {names}")
        if found:
            return found[0]
    return None


def _is_index(file: Path) -> bool:
    """Whether a file tells where tensors are, e.g. ``model.safetensors.index.fp16.json``."""
    return ".index." in file.name and file.suffix == ".json"


def _is_safetensors(file: Path) -> bool:
    return file.suffix.lower() == ".safetensors" and file.is_file()


def _is_other(file: Path) -> bool:
    """Whether a file may hold weights in a form that is not the best."""
    return file.suffix.lower() in SUFFIXES and file.is_file() and not file.name.startswith(BESIDE)


def shards(file: Path) -> list[Path]:
    """The files of weights that an index names, each once; or the file alone.

    Raises:
        Unusable: the index names none.
    """
    if not _is_index(file):
        return [file]
    places = read_json(file).get("weight_map")
    if not isinstance(places, dict):
        raise Unusable(f"{printable(file.name)} names no files of weights: fetch it again")
    return [file.parent / name for name in sorted(set(places.values()))]


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        Unusable: there is none.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Unusable(f"{printable(file.name)} is no JSON ({error}): fetch it again") from error
    if not isinstance(found, dict):
        raise Unusable(f"{printable(file.name)} holds no JSON object: fetch it again")
    return found


def read_tensors(file: Path) -> tuple[Mapping[str, Any], str]:
    """The named tensors of a local file, and under which key its trainer kept them.

    The key is "" where the file holds nothing else. Those of a .npz are NumPy arrays, each read
    when it is asked for. Only tensors are read, whatever timm's release would do.

    Raises:
        Unusable: a .safetensors or .npz that is not whole, or an archive of other arrays.
        ValueError: the file holds something else.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from timm.models import clean_state_dict

    _check_form(file)
    if file.suffix.lower() == ".npz":
        return _open_archive(file), ""
    if _is_safetensors(file):
        try:
            return clean_state_dict(load_file(file)), ""
        except SafetensorError as error:
            raise Unusable(
                f"it is no whole .safetensors file ({error}): fetch it again, or save it again"
            ) from error
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


def _open_archive(file: Path) -> Mapping[str, Any]:
    """The arrays of Google's release.

    Raises:
        Unusable: other arrays, or a file that is not whole.
    """
    import numpy as np

    try:
        arrays = np.load(file, allow_pickle=False)
    except (BadZipFile, ValueError, EOFError) as error:
        raise Unusable(f"it is no whole .npz file ({error}): fetch it again") from error
    if not any(name.endswith(GOOGLES_PATCH_EMBEDDING) for name in arrays):
        names = ", ".join(map(printable, [*arrays][:3]))
        raise Unusable(
            f"it holds {len(arrays)} NumPy arrays ({names} ...), and none is the patch embedding "
            f"of an image tower of Google's (.../{GOOGLES_PATCH_EMBEDDING}): give a file like "
            "siglip2_b16_naflex.npz"
        )
    return arrays


def _allow_what_trainers_keep() -> None:
    """Let torch read, beside tensors, the options of timm's train.py and NumPy's numbers."""
    import numpy as np
    import torch

    numbers = [type(np.dtype(name)) for name in ("int64", "float32", "float64")]
    make_number = np.float64().__reduce__()[0]
    torch.serialization.add_safe_globals([argparse.Namespace, np.dtype, make_number, *numbers])
