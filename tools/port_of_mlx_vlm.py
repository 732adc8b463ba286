"""Let mlx-vlm's ports of SigLIP-2's tower write what they make of the kit's pixels.

    pip install "mlx[cpu]" mlx-vlm            # an environment of its own; tried: 0.32.4, 0.7.10
    python tools/port_of_mlx_vlm.py lfm2_vl FOLDER       # or phi4_siglip

The folder is then compared: naflex-fast compare recordings/siglip2_naflex_tiny FOLDER
"""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
from safetensors.numpy import load_file

KIT = Path(__file__).parents[1] / "recordings" / "siglip2_naflex_tiny"


def main(name: str, folder: Path) -> None:
    """Run one port on all pictures, padded, and write a file for each stage."""
    mx.set_default_device(mx.cpu)
    about = json.loads((KIT / "recording.json").read_text())
    stages = load_file(KIT / "stages.safetensors")
    weights = load_file(KIT / "weights" / "transformers.safetensors")
    width = weights["embeddings.patch_embedding.bias"].shape[0]
    blocks = sum(key.endswith("layer_norm1.weight") for key in weights)
    settings = dict(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=blocks,
        num_attention_heads=about["heads"],
        num_patches=about["table_size"][0] * about["table_size"][1],
        patch_size=about["patch_size"],
        layer_norm_eps=1e-6,
    )
    config_class = importlib.import_module(f"mlx_vlm.models.{name}.config").VisionConfig
    fields = {field.name for field in dataclasses.fields(config_class)}
    config = config_class(**{key: settings[key] for key in settings if key in fields})
    tower = importlib.import_module(f"mlx_vlm.models.{name}.vision").VisionModel(config)
    for inner in ("vision_tower", "vision_model"):
        tower = getattr(tower, inner, tower)
    without_head = [(key, mx.array(weights[key])) for key in weights if not key.startswith("head")]
    tower.load_weights(without_head)

    # One padded batch of all pictures.
    count = len(about["pictures"])
    grid = np.stack([stages[f"{number:03}.grid"] for number in range(count)])
    length = about["max_patches"]
    pixels = np.zeros((count, length, stages["000.pixels"].shape[1]), np.float32)
    valid = np.zeros((count, length), np.int32)
    for number in range(count):
        own = stages[f"{number:03}.pixels"]
        pixels[number, : len(own)] = own
        valid[number, : len(own)] = 1
    batch = mx.array(pixels)
    shapes = mx.array(grid)
    mask = {}
    if name == "lfm2_vl":  # phi4_siglip takes none
        mask["pixel_attention_mask"] = mx.array(valid)
    hidden = tower(batch, output_hidden_states=True, spatial_shapes=shapes, **mask)[0]
    found = {
        "patch_embedding": tower.embeddings.patch_embedding(batch),
        "position_embedding": tower.embeddings(batch, spatial_shapes=shapes),
    }
    for number in range(blocks):
        found[f"block_{number}"] = hidden[number + 1]
    folder.mkdir(parents=True, exist_ok=True)
    for stage, values in found.items():
        np.save(folder / f"{stage}.npy", np.array(values))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
