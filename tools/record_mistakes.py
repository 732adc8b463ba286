"""Add what known mistakes give to the recording of SigLIP-2's original implementation.

    uv run tools/record_mistakes.py            # after tools/record_original.py, or after a new mistake

timm runs each mistake of ``recordings/mistakes.py`` on the kit's weights and the original's pixels.
"""

import json
from pathlib import Path

import torch
from PIL import Image
from safetensors.numpy import save_file

from timm_naflex_fast.commands.measure.models import load_model
from timm_naflex_fast.commands.measure.record import describe_mistakes, known_mistakes, timm_source
from timm_naflex_fast.commands.recordings.format import read_recording

KIT = Path(__file__).parents[1] / "recordings" / "siglip2_naflex_tiny"
MODEL = "naflexvit_base_patch16_siglip.v2_webli"


def main() -> None:
    """Run the mistakes, and write recording.json and mistakes.safetensors anew."""
    torch.set_num_threads(1)
    recording = read_recording(KIT)
    about = dict(recording.about)
    model, _ = load_model(
        MODEL, KIT / "weights" / "transformers.safetensors", num_heads=about["heads"]
    )
    source = timm_source(model, about["max_patches"], about["filter"])
    pictures = [Image.open(KIT / picture["file"]).convert("RGB") for picture in about["pictures"]]
    found = known_mistakes(source, pictures, recording.stages)
    about["mistakes"], arrays = describe_mistakes(found)
    save_file(arrays, KIT / "mistakes.safetensors")
    text = json.dumps(about, indent=1, ensure_ascii=False) + "\n"
    (KIT / "recording.json").write_text(text, encoding="utf-8")
    print(f"{len(about['mistakes'])} mistakes, {len(arrays)} arrays")


if __name__ == "__main__":
    main()
