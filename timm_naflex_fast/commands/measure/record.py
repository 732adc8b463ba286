"""Make a recording: a pipeline's stages, and what rounding may move there.

Tests: tests/commands/cli/test_record.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from vit_ports.format import (
    OWN_PIXELS,
    VERSION,
    Array,
    Recording,
    Stages,
    float32_limits,
)
from vit_ports.rule import Stage

from .pipelines import Pictures, Source

# Times what was moved: another port rounds at other places. TF32 has as many bits as float16, but
# hardware cuts the operands of products off where float16 rounds, which moves up to twice as much.
ROOM = {"tf32": 6.0, "float16": 3.0, "bfloat16": 3.0, OWN_PIXELS: 2.0}


def make_recording(
    source: Source, pictures: Pictures, names: Sequence[str], about: Mapping[str, Any]
) -> Recording:
    """Run pictures through a pipeline. Its limits are those of float32; mistakes are not run.

    Args:
        source: what is recorded.
        pictures: PIL images in RGB, upright.
        names: of the pictures.
        about: "written_by" and "weights" of recording.json.
    """
    stages = source.tower(source.read(pictures))
    described = []
    for number, (name, picture, own) in enumerate(zip(names, pictures, stages)):
        described.append(
            {
                "file": f"pictures/{number:03}.png",
                "name": name,
                "size": [picture.height, picture.width],
                "grid": own["grid"].tolist(),
            }
        )
    limits = [{"name": stage, "limits": {"float32": float32_limits(stage)}} for stage in stages[0]]
    # Pixels are (byte / 255 - mean) / std: what is made of black and of white tells both.
    ends = source.read([Image.new("RGB", (64, 64), colour) for colour in ("black", "white")])
    black, white = (own["pixels"][0, :3].astype(np.float64) for own in ends)
    std = 1 / (white - black)
    embeds = source.model.embeds
    table: Array = embeds.pos_embed[0].detach().numpy()  # (H0, W0, C)
    written = {
        "format": "naflex-recording",
        "version": VERSION,
        **about,
        "patch_size": embeds.patch_size[0],
        "table_size": list(table.shape[:2]),
        "max_patches": source.max_patches,
        "heads": source.model.blocks[0].attn.num_heads,
        "mean": list(-black * std),
        "std": list(std),
        "filter": source.filter,
        "pictures": described,
        "stages": limits,
        "mistakes": [],
        "mistakes_tried": 0,
    }
    return Recording(written, stages, table, {})


def with_limits(recording: Recording, source: Source) -> Recording:
    """A recording with what counts as rounding at each stage, by precision and measure.

    Float32's limits are fixed. Those of lower precisions, and of pixels that another resizer
    rounded, are measured: the pipeline runs so, on the first pictures.
    """
    given = recording.stages[:8]  # pictures are enough
    std = recording.about["std"]
    random = np.random.default_rng(0)
    noisy = []
    for own in given:
        pixels = own["pixels"]  # (N, p * p * 3)
        # Rounding to whole grey levels moves a pixel by one level.
        levels = random.integers(-1, 2, pixels.shape)
        level = 1 / np.multiply(255, std)
        moved = levels * np.resize(level, pixels.shape[1])
        noisy.append({**own, "pixels": pixels + moved})
    right = source.tower(given)
    half = source.tower(given, torch.float16)
    made = {
        "tf32": half,
        "float16": half,
        "bfloat16": source.tower(given, torch.bfloat16),
        OWN_PIXELS: source.tower(noisy),
    }
    stages = []
    for stage in recording.order:
        limits = {"float32": float32_limits(stage)}
        for name, ours in made.items():
            limits[name] = wider(stage, ours, right, std, ROOM[name])
        stages.append({"name": stage, "limits": limits})
    return replace(recording, about={**recording.about, "stages": stages})


def wider(
    stage: str, ours: Sequence[Stages], right: Sequence[Stages], std: Sequence[float], room: float
) -> dict[str, float]:
    """A stage's limits by measure, those beyond float32's: ``room`` times what the worst picture has."""
    limits = float32_limits(stage)
    reference = [own[stage] for own in right]
    port = dict(enumerate(own[stage] for own in ours))
    compared = Stage(stage, reference, port, std, limits)
    for picture, numbers in enumerate(reference):
        for measure, off in compared.differences(picture, numbers).items():
            limit = min(room * float(off.max()), 1.0)  # all of a number
            limits[measure] = max(limits[measure], limit)
    return limits
