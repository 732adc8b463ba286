"""From what a user names to tensors: a file, an index of shards, a folder, a name on the hub.

Nothing is fetched, and nothing but tensors is ever read: a pickle can run any code.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Tensors = Mapping[str, Any]  # by their names

# What a folder may hold, in the order in which it is looked for.
FILES = ("*.index*.json", "*.safetensors", "*.bin", "*.npz", "*.pth", "*.pt", "*.ckpt", "*.tar")


def find_weights(path: str | Path) -> Path:
    """The file of weights that ``path`` means.

    Args:
        path: the file itself, or an index of shards; a folder that holds one of ``FILES``; or
            OWNER/NAME of a model in the hub's cache.

    Raises:
        ValueError: there is none, or there are several.
    """
    named = Path(path)
    if not named.exists():
        from huggingface_hub import snapshot_download

        try:
            # Nothing is asked for by name: whoever loaded the model fetched only what he needed.
            folder = snapshot_download(str(path), local_files_only=True, allow_patterns=[])
            named = Path(folder)
        except (OSError, ValueError) as error:  # not in the cache, or no name of a model
            raise ValueError(
                f"no file or folder {path}, and no such model in the hub's cache"
            ) from error
    if named.is_file():
        return named
    for pattern in FILES:
        found = sorted(named.glob(pattern))
        if found:
            break
    if len(found) == 1:
        return found[0]
    names = ", ".join(file.name for file in found)
    raise ValueError(f"the folder {named} must hold one file of weights; found: {names or 'none'}")


def read_tensors(file: Path) -> Tensors:
    """The named tensors of a local file, or of the files that an index names.

    Of what a trainer saved, timm chooses: averaged weights come first. Errors are the readers' own.
    """
    import torch
    from safetensors.torch import load_file
    from timm.models import load_state_dict

    if ".index." in file.name:
        places = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        tensors: dict[str, Any] = {}
        for name in sorted(set(places.values())):
            tensors |= read_tensors(file.parent / name)
        return tensors
    if file.suffix == ".safetensors":
        return load_file(file)
    # What timm's train.py writes holds its options; timm 1.0.16 does not allow them.
    torch.serialization.add_safe_globals([argparse.Namespace])
    return load_state_dict(str(file), weights_only=True)
