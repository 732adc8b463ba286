"""Who agrees with SigLIP-2's original implementation, and to how much.

    uv run ports/tools/agreement.py                                          # timm, and transformers
    uv run ports/tools/agreement.py --port "mlx-vlm 0.7.10 lfm2_vl=FOLDER"   # and ports that wrote a folder

Each begins with the pixels of the kit, ports/kit, which big_vision wrote. What
is said of it goes to lab/results/recordings/agreement.json. tools/port_of_mlx_vlm.py of commit 17d0031d
wrote such folders from mlx-vlm, in an environment of its own.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from timm_naflex_fast.commands.measure.models import load_model
from timm_naflex_fast.commands.measure.output import provenance
from timm_naflex_fast.commands.measure.pipelines import timm_source, transformers_source
from timm_naflex_fast.names import STRATEGY_NAMES
from vit_ports.compare import compare_recordings
from vit_ports.format import (
    Recording,
    Stages,
    read_port,
    read_recording,
)
from vit_ports.rule import Stage, stages_at

ROOT = Path(__file__).parents[2]
KIT = ROOT / "ports" / "kit"
OUT = ROOT / "lab" / "results" / "recordings" / "agreement.json"
MODEL = "naflexvit_base_patch16_siglip.v2_webli"
KIT_SIZES: dict[str, Any] = dict(
    embed_dim=32, depth=2, num_heads=4, patch_size=8, pos_embed_grid_size=(12, 12)
)


def row(name: str, recording: Recording, ports: Sequence[Stages]) -> dict[str, Any]:
    """What is said of one port."""
    precision = "float32"
    found = compare_recordings(recording, ports, precision)
    return {
        "who": name,
        "stages": {one.name: largest_share(one) for one in stages_at(precision, recording, ports)},
        "precision": precision,
        "parts at": found.first and found.first.stage,
        "reason": [found.reason.words] if found.reason else [],
    }


def largest_share(stage: Stage) -> float:
    """The largest difference, as a share of the picture's largest number, of all pictures."""
    shares = [0.0]
    for picture, ours in stage.port.items():
        theirs = stage.reference[picture]
        shares.append(float(np.abs(ours - theirs).max() / np.abs(theirs).max()))
    return max(shares)


def without_pixels(ports: Sequence[Stages]) -> list[Stages]:
    """The stages that follow the pixels."""
    return [{name: one[name] for name in one if name != "pixels"} for one in ports]


def towers(recording: Recording) -> Iterator[tuple[str, list[Stages]]]:
    """timm under each mode, and transformers, from the kit's pixels."""
    length = recording.about["max_patches"]
    model, _ = load_model(MODEL, KIT / "weights" / "transformers.safetensors", **KIT_SIZES)
    for contender in ("stock", *STRATEGY_NAMES):
        name = f"timm {version('timm')}"
        if contender != "stock":
            name += f", {contender} of this package"
        yield name, timm_source(model, length, "bilinear", contender).tower(recording.stages)
    source = transformers_source(model, length, KIT / "weights")
    yield source.words, source.tower(recording.stages)


def main() -> int:
    """Compare all of them, print a line for each, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", action="append", default=[], metavar="NAME=FOLDER")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recording = read_recording(KIT)
    jax = json.loads((OUT.parent / "jax_float64.json").read_text())
    versions = jax["made"]["versions"]
    rows = [
        {
            "who": f"big_vision itself, JAX {versions['jax']} in float64",
            "stages": jax["stages"],
            "precision": "float32",
            "parts at": None,
            "reason": [],
        }
    ]
    for name, ports in towers(recording):
        rows.append(row(name, recording, without_pixels(ports)))
    for text in options.port:
        name, folder = text.rsplit("=", 1)
        rows.append(row(name, recording, read_port(Path(folder), recording)))
    for one in rows:
        print(one["who"], one["stages"].get("pooled"), one["parts at"], *one["reason"])
    command = "uv run ports/tools/agreement.py" + ' --port "NAME=FOLDER"' * len(options.port)
    record = {**provenance(command), "pictures": len(recording.stages), "rows": rows}
    OUT.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
