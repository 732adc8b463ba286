"""Add limits and known mistakes to the recording of SigLIP-2's original implementation.

    uv run ports/tools/record_mistakes.py            # after ports/tools/record_original.py, or after a new mistake

timm's tower measures what rounding moves, and the port in NumPy makes the mistakes: with the kit's
weights, on the original's pixels.
"""

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.numpy import load_file, save

from timm_naflex_fast.commands.measure.models import load_model
from timm_naflex_fast.commands.measure.pipelines import timm_source
from vit_ports.format import TABLE, VERSION, Recording
from vit_ports.limits import with_limits
from vit_ports.mistakes import mistakes_of, with_mistakes
from vit_ports.towers.siglip2 import SIGLIP2

KIT = Path(__file__).parents[1] / "kit"
MODEL = "naflexvit_base_patch16_siglip.v2_webli"
SIZES: dict[str, Any] = dict(
    embed_dim=32, depth=2, num_heads=4, patch_size=8, pos_embed_grid_size=(12, 12)
)


def main() -> None:
    """Write recording.json and mistakes.safetensors anew."""
    torch.set_num_threads(1)
    file = KIT / "recording.json"
    about = json.loads(file.read_text(encoding="utf-8"))
    found = load_file(KIT / "stages.safetensors")
    stages = []
    for number in range(len(about["pictures"])):
        names = [stage["name"] for stage in about["stages"]]
        stages.append({name: found[f"{number:03}.{name}"] for name in names})
    weights = KIT / "weights" / "transformers.safetensors"
    model, _ = load_model(MODEL, weights, **SIZES)

    about["version"] = VERSION
    recording = Recording(about, stages, found[TABLE], {})
    source = timm_source(model, about["max_patches"])
    recording = with_limits(SIGLIP2, recording, source.tower)
    pictures = [Image.open(KIT / picture["file"]) for picture in about["pictures"]]
    mistakes = mistakes_of(SIGLIP2, len(model.blocks))
    recording = with_mistakes(SIGLIP2, recording, load_file(weights), pictures, mistakes)

    (KIT / "mistakes.safetensors").write_bytes(save(dict(recording.mistakes)))
    text = json.dumps(recording.about, indent=1, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")
    print(f"{len(recording.about['mistakes'])} mistakes, {len(recording.mistakes)} arrays")


if __name__ == "__main__":
    main()
