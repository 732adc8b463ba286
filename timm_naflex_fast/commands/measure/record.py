"""Make a recording: a pipeline's stages, what rounding may move there, and known mistakes.

Tests: tests/commands/cli/test_record.py.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..recordings.format import (
    FORMAT,
    OWN_PIXELS,
    VERSION,
    Array,
    Recording,
    Stages,
    float32_limits,
    stage_entry,
)
from ..recordings.mistakes import Mistake, known_mistakes
from ..recordings.rule import Stage
from .pipelines import Inputs, Pictures, Source, siglip2_weights

# Times what was moved: another port rounds at other places.
ROOM = {"float16": 3.0, "bfloat16": 3.0, OWN_PIXELS: 2.0}
ALL = 1.0  # of a number: no limit is larger
BATCH = 8  # pictures that are run together; limits are measured on the first ones
TRIED = 4  # mistakes are run on the first pictures: a base model takes a second for each
HALF_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def make_recording(
    source: Source, pictures: Pictures, names: Sequence[str], about: Mapping[str, Any]
) -> Recording:
    """Run pictures through a pipeline, and measure what rounding moves. Mistakes are not run.

    Args:
        source: what is recorded.
        pictures: PIL images in RGB, upright.
        names: of the pictures.
        about: "written_by" and "weights" of recording.json.
    """
    pipeline = source.build(torch.float32)
    stages: list[Stages] = []
    for start in range(0, len(pictures), BATCH):
        inputs = pipeline.read(pictures[start : start + BATCH])
        stages += pipeline.tower(inputs)
    described = []
    for name, picture, own in zip(names, pictures, stages):
        size = [picture.height, picture.width]
        described.append({"name": name, "size": size, "grid": own["grid"].tolist()})
    limits = measure_limits(source, stages[:BATCH])
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
        "mean": list(source.mean),
        "std": list(source.std),
        "filter": source.filter,
        "pictures": described,
        "stages": [stage_entry(stage, limits[stage]) for stage in stages[0]],
        "mistakes": [],
        "mistakes_tried": 0,
    }
    return Recording(written, stages, table, {})


def with_mistakes(
    recording: Recording,
    model: Any,
    pictures: Pictures,
    mistakes: Iterable[Mistake],
) -> Recording:
    """A recording with what known mistakes give, on its first pictures.

    Args:
        recording: without them.
        model: a timm NaFlexVit that holds the recording's weights.
        pictures: those of the recording, as PIL images in RGB.
        mistakes: which ones are tried.

    Raises:
        Unusable: the model is no Siglip2 tower, of which the mistakes are.
    """
    tensors = siglip2_weights(model)
    weights = {name: one.numpy() for name, one in tensors.items()}
    tried = pictures[:TRIED]
    entries, arrays = known_mistakes(recording, weights, tried, mistakes)
    about = {**recording.about, "mistakes": entries, "mistakes_tried": len(tried)}
    return replace(recording, about=about, mistakes=arrays)


def measure_limits(source: Source, stages: Sequence[Stages]) -> dict[str, dict[str, Any]]:
    """What counts as rounding at each stage, by precision and measure.

    Float32's limits are fixed. Those of half a precision, and of pixels that another resizer
    rounded, are measured: the pipeline runs so. TF32 has as many bits as float16, but hardware cuts
    the operands of products off where float16 rounds, which moves up to twice as much.
    """
    inputs = inputs_of(stages, source.max_patches)
    pipeline = source.build(torch.float32)
    right = pipeline.tower(inputs)
    made = {}
    for precision, dtype in HALF_TYPES.items():
        half = inputs.pixels.to(dtype).float()
        in_half = source.build(dtype)
        made[precision] = in_half.tower(inputs._replace(pixels=half))
    # Rounding to whole grey levels moves a pixel by one level.
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(-1, 2, inputs.pixels.shape, generator=generator)
    pixels = Stage("pixels", [right[0]["pixels"]], {}, source.std, {})
    level = torch.tensor(pixels.sizes)
    noisy = inputs.pixels + levels * level
    made[OWN_PIXELS] = pipeline.tower(inputs._replace(pixels=noisy.float()))

    limits: dict[str, dict[str, Any]] = {}
    for stage in right[0]:
        own = {"float32": float32_limits(stage)}
        for name, moved in made.items():
            own[name] = wider(stage, moved, right, source.std, ROOM[name])
        own["tf32"] = dict(own["float16"])
        for measure in own["tf32"]:
            own["tf32"][measure] *= 2
        if stage in ("grid", "pixels"):
            own["tf32"] = own["float32"]
            del own[OWN_PIXELS]  # which are the pixels themselves
        limits[stage] = own
    return limits


def wider(
    stage: str, ours: Sequence[Stages], right: Sequence[Stages], std: Sequence[float], room: float
) -> dict[str, float]:
    """A stage's limits by measure, those beyond float32's: ``room`` times what the worst picture has."""
    limits = float32_limits(stage)
    reference = [own[stage] for own in right]
    port = {picture: made[stage] for picture, made in enumerate(ours)}
    compared = Stage(stage, reference, port, std, limits)
    for picture, numbers in enumerate(reference):
        for measure, off in compared.differences(picture, numbers).items():
            limit = min(room * off.max(), ALL)
            rounded = float(f"{limit:.2e}")
            limits[measure] = max(limits[measure], rounded)
    return limits


def inputs_of(stages: Sequence[Stages], length: int) -> Inputs:
    """What a tower takes: the grids and pixels of pictures, padded to ``length`` patches."""
    grids = [own["grid"] for own in stages]
    grid = torch.tensor(np.array(grids, np.int64))
    valid = torch.arange(length) < grid.prod(1, keepdim=True)  # (B, N)
    width = stages[0]["pixels"].shape[1]
    pixels = torch.zeros(*valid.shape, width)  # (B, N, p * p * 3)
    written = np.concatenate([own["pixels"] for own in stages])
    pixels[valid] = torch.tensor(np.float32(written))
    return Inputs(grid, pixels, valid)
