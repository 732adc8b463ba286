"""Make a recording: a pipeline's stages, and what rounding may move there.

Tests: tests/commands/cli/test_record.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..recordings.format import (
    FORMAT,
    OWN_PIXELS,
    VERSION,
    Array,
    Recording,
    Stages,
    float32_limits,
)
from ..recordings.rule import Stage
from .pipelines import BATCH, Pictures, Source

# Times what was moved: another port rounds at other places.
ROOM = {"float16": 3.0, "bfloat16": 3.0, OWN_PIXELS: 2.0}
ALL = 1.0  # of a number: no limit is larger
HALF_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


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
    for name, picture, own in zip(names, pictures, stages):
        size = [picture.height, picture.width]
        described.append({"name": name, "size": size, "grid": own["grid"].tolist()})
    limits = [{"name": stage, "limits": {"float32": float32_limits(stage)}} for stage in stages[0]]
    # Pixels are (byte / 255 - mean) / std: what is made of black and of white tells both.
    ends = source.read([Image.new("RGB", (64, 64), colour) for colour in ("black", "white")])
    black, white = (own["pixels"][0, :3].astype(np.float64) for own in ends)
    std = 1 / (white - black)
    embeds = source.model.embeds
    table: Array = embeds.pos_embed[0].detach().numpy()  # (H0, W0, C)
    written = {
        "format": FORMAT,
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

    Float32's limits are fixed. Those of half a precision, and of pixels that another resizer
    rounded, are measured: the pipeline runs so, on the first pictures. TF32 has as many bits as
    float16, but hardware cuts the operands of products off where float16 rounds, which moves up to
    twice as much.
    """
    given = recording.stages[:BATCH]
    made = {name: source.tower(given, dtype) for name, dtype in HALF_TYPES.items()}
    # Rounding to whole grey levels moves a pixel by one level.
    random = np.random.default_rng(0)
    std = recording.about["std"]
    noisy = []
    for own in given:
        colours = own["pixels"].reshape(-1, 3)
        levels = random.integers(-1, 2, colours.shape)
        moved = colours + levels / np.multiply(255, std)
        noisy.append({**own, "pixels": moved.reshape(own["pixels"].shape)})
    made[OWN_PIXELS] = source.tower(noisy)
    right = source.tower(given)
    stages = []
    for stage in recording.order:
        limits = {"float32": float32_limits(stage)}
        for name, moved in made.items():
            limits[name] = wider(stage, moved, right, std, ROOM[name])
        limits["tf32"] = {measure: 2 * limit for measure, limit in limits["float16"].items()}
        if stage in ("grid", "pixels"):
            limits["tf32"] = limits["float32"]
            del limits[OWN_PIXELS]  # which are the pixels themselves
        stages.append({"name": stage, "limits": limits})
    return replace(recording, about={**recording.about, "stages": stages})


def wider(
    stage: str, ours: Sequence[Stages], right: Sequence[Stages], std: Sequence[float], room: float
) -> dict[str, float]:
    """A stage's limits by measure, those beyond float32's: ``room`` times what the worst picture has."""
    limits = float32_limits(stage)
    reference = [own[stage] for own in right]
    port = {picture: own[stage] for picture, own in enumerate(ours)}
    compared = Stage(stage, reference, port, std, limits)
    for picture, numbers in enumerate(reference):
        for measure, off in compared.differences(picture, numbers).items():
            limit = min(room * off.max(), ALL)
            limits[measure] = max(limits[measure], float(f"{limit:.2e}"))
    return limits
