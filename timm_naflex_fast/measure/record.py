"""Make a recording: a pipeline's stages, what rounding may move there, and known mistakes."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attributes import temporarily
from ..recordings import mistakes as lists
from ..recordings.format import (
    FORMAT,
    VERSION,
    Array,
    Recording,
    Stages,
    float32_limit,
    stage_entry,
)
from ..recordings.mistakes import Mistake
from .pipelines import Inputs, Pictures, Pipeline, stages_of

ROOM = 3.0  # times what half a precision moved: another port rounds at other places
PIXEL_ROOM = 2.0  # times what random grey levels moved
GREY_LEVEL = 2 / 255
BATCH = 8  # pictures that are run together; limits and mistakes are measured on the first ones
HALF_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# How SigLIP-2's table is resampled, in timm's settings.
TRAINED = dict(
    pos_embed_interp_mode="bilinear",
    pos_embed_antialias=True,
    pos_embed_align_corners=False,
    pos_embed_ar_preserving=False,
    pos_embed_use_grid_sample=False,
)


@dataclass(frozen=True)
class Source:
    """What is recorded.

    Attributes:
        pipeline: the reference.
        twin: from a timm model to timm's pipeline of the same numbers, which runs the mistakes.
        model: the timm NaFlexVit that holds the weights.
        max_patches: most patches of a picture.
        filter: of the resize of pictures.
    """

    pipeline: Pipeline
    twin: Callable[[Any], Pipeline]
    model: Any
    max_patches: int
    filter: str


def make_recording(
    source: Source,
    pictures: Pictures,
    names: Sequence[str],
    about: Mapping[str, Any],
    advance: Callable[[float], Any] = lambda parts: None,
) -> Recording:
    """Run pictures through a pipeline, and through each mistake.

    Args:
        source: what is recorded.
        pictures: PIL images in RGB, upright.
        names: of the pictures.
        about: "written_by" and "weights" of recording.json.
        advance: called with 1 after each mistake and each precision; see ``count_runs``.
    """
    stages: list[Stages] = []
    for start in range(0, len(pictures), BATCH):
        inputs = source.pipeline.read(pictures[start : start + BATCH])
        stages += stages_of(inputs, source.pipeline.tower(inputs))
    limits = measure_limits(source, stages[:BATCH], advance)
    entries, arrays = describe_mistakes(
        known_mistakes(source, pictures[:BATCH], stages[:BATCH], advance)
    )
    model = source.model
    table = table_of(model)
    described = {
        "format": FORMAT,
        "version": VERSION,
        **about,
        "patch_size": model.embeds.patch_size[0],
        "table_size": list(table.shape[:2]),
        "max_patches": source.max_patches,
        "heads": model.blocks[0].attn.num_heads,
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "filter": source.filter,
        "pictures": [
            {"name": name, "size": [picture.height, picture.width], "grid": own["grid"].tolist()}
            for name, picture, own in zip(names, pictures, stages)
        ],
        "stages": [stage_entry(stage, limits[stage]) for stage in stages[0]],
        "mistakes": entries,
    }
    return Recording(described, stages, table, arrays)


def describe_mistakes(
    found: Iterable[tuple[Mistake, tuple[int, Stages]]],
) -> tuple[list[dict[str, Any]], dict[str, Array]]:
    """The entries of recording.json for mistakes, and the arrays of mistakes.safetensors."""
    entries: list[dict[str, Any]] = []
    arrays: dict[str, Array] = {}
    for mistake, (picture, numbers) in found:
        first, *_ = numbers
        entries.append(
            {"name": mistake.name, "words": mistake.words, "stage": first, "picture": picture}
        )
        for stage, array in numbers.items():
            # Grey levels need no more than half a precision.
            kind = np.float16 if stage == "pixels" else array.dtype
            arrays[f"{mistake.name}/{picture:03}.{stage}"] = np.ascontiguousarray(array, kind)
    return entries, arrays


def count_runs(model: Any) -> int:
    """How often ``make_recording`` calls ``advance``."""
    return len(HALF_TYPES) + 1 + len(all_mistakes(model))


def all_mistakes(model: Any) -> list[Mistake]:
    """Every mistake that is tried."""
    before_tower = [*lists.PICTURES, *lists.PATCHES, *lists.KERNELS, *lists.POSITIONS]
    return before_tower + tower_mistakes(model)


def measure_limits(
    source: Source, stages: Sequence[Stages], advance: Callable[[float], Any]
) -> dict[str, dict[str, float]]:
    """The largest difference at each stage that counts as rounding, by precision.

    Those of half a precision, and of pixels that another resizer rounded, are measured: the twin
    runs so. They are shares of the stage's largest number.
    """
    limits = {stage: {"float32": float32_limit(stage)} for stage in stages[0]}
    inputs = inputs_of(stages, source.max_patches)
    right = stages_of(inputs, source.twin(source.model).tower(inputs))
    for precision, dtype in HALF_TYPES.items():
        limits["pixels"][precision] = limits["pixels"]["float32"] + torch.finfo(dtype).eps / 2
        twin = source.twin(copy.deepcopy(source.model).to(dtype))
        moved = stages_of(inputs, twin.tower(inputs))
        for stage, share in _shares(moved, right).items():
            limits[stage][precision] = max(ROOM * share, limits[stage]["float32"])
        advance(1)
    # Rounding to whole grey levels moves a pixel by one level.
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(-1, 2, inputs.pixels.shape, generator=generator)
    noisy = inputs._replace(pixels=(inputs.pixels + levels * GREY_LEVEL).clamp(-1, 1))
    moved = stages_of(noisy, source.twin(source.model).tower(noisy))
    for stage, share in _shares(moved, right).items():
        if stage not in ("grid", "pixels"):
            limits[stage]["own_pixels"] = PIXEL_ROOM * share
    advance(1)
    return limits


def _shares(moved: Sequence[Stages], right: Sequence[Stages]) -> dict[str, float]:
    """The largest difference at each stage, as a share of the picture's largest number."""
    shares: dict[str, float] = {}
    for ours, theirs in zip(moved, right):
        for stage, numbers in theirs.items():
            if stage in ("grid", "pixels"):
                continue
            off = np.abs(ours[stage] - numbers).max() / (np.abs(numbers).max() or 1.0)
            shares[stage] = max(shares.get(stage, 0.0), float(off))
    return shares


def inputs_of(stages: Sequence[Stages], length: int) -> Inputs:
    """What a tower takes: the grids and pixels of pictures, padded to ``length`` patches."""
    grid = torch.tensor(np.array([own["grid"] for own in stages], np.int64))
    width = stages[0]["pixels"].shape[1]
    pixels = torch.zeros(len(stages), length, width)  # (B, N, p * p * 3)
    valid = torch.zeros(len(stages), length, dtype=torch.bool)
    for number, own in enumerate(stages):
        count = len(own["pixels"])
        pixels[number, :count] = torch.from_numpy(np.array(own["pixels"], np.float32))
        valid[number, :count] = True
    return Inputs(grid, pixels, valid)


def known_mistakes(
    source: Source,
    pictures: Pictures,
    stages: Sequence[Stages],
    advance: Callable[[float], Any] = lambda parts: None,
) -> Iterator[tuple[Mistake, tuple[int, Stages]]]:
    """Run one mistake after the other on a reference's pictures.

    Args:
        source: of the reference.
        pictures: PIL images in RGB.
        stages: the reference's, for each picture.
        advance: called with 1 after each.

    Yields:
        The mistake; a picture that shows it, not square if there is one; and its numbers there, at the first stage that
        shows it, the next one, and "pooled". Nothing of a mistake that does not show, nor of stages
        from the one on where the twin differs itself: it has another activation, say.
    """
    model = source.model
    tower = source.twin(model).tower
    size = model.embeds.patch_size[0]
    length = source.max_patches
    table = table_of(model)
    inputs = inputs_of(stages, length)
    order = _agreed(stages_of(inputs, tower(inputs)), stages)

    def run(own: Stages, _: Stages) -> Stages:
        """All stages that follow from a picture's grid and pixels."""
        inputs = inputs_of([own], length)
        return stages_of(inputs, tower(inputs))[0]

    def run_from_tokens(own: Stages, right: Stages) -> Stages:
        """All stages that follow from embedded tokens."""
        valid = torch.from_numpy(own["position_embedding"])[None]  # (1, h * w, C)
        tokens = torch.nn.functional.pad(valid, (0, 0, 0, length - valid.shape[1]))  # (1, N, C)
        replaced = model.embeds.register_forward_hook(lambda _, __, output: (tokens, *output[1:]))
        with replaced:
            return run(right, right)

    for mistake in lists.PICTURES:
        made = []
        for picture, own in zip(pictures, stages):
            about = lists.Picture(picture, size, source.max_patches, source.filter, own)
            made.append(mistake.make(about))
        yield from _kept(mistake, made, stages, order, run)
        advance(1)
    for mistake in lists.PATCHES:
        made = []
        for own in stages:
            pixels = mistake.make(own["pixels"], own["grid"], size)
            made.append({"grid": own["grid"], "pixels": np.ascontiguousarray(pixels)})
        yield from _kept(mistake, made, stages, order, run)
        advance(1)
    for mistake in lists.KERNELS:
        made = []
        for own in stages:
            pixels = mistake.make(own["pixels"], own["grid"], size)
            whole = run({"grid": own["grid"], "pixels": np.ascontiguousarray(pixels)}, own)
            made.append({stage: whole[stage] for stage in whole if stage != "pixels"})
        yield from _kept(mistake, made, stages, order, lambda own, _: own)
        advance(1)
    for mistake in lists.POSITIONS:
        made = []
        for own in stages:
            tokens = own["patch_embedding"] + mistake.make(table, *map(int, own["grid"]))
            made.append({"position_embedding": tokens.astype(np.float32)})
        yield from _kept(mistake, made, stages, order, run_from_tokens)
        advance(1)
    for mistake in tower_mistakes(model):
        try:
            with mistake.make(model):
                made = stages_of(inputs, tower(inputs))
        except (ValueError, RuntimeError, AttributeError):
            made = []  # this model cannot make it: it has no bias, or one head
        yield from _kept(mistake, made, stages, order, lambda own, _: own)
        advance(1)


def tower_mistakes(model: Any) -> list[Mistake]:
    """The mistakes of the blocks and of the head, where the model has one."""
    found = [*lists.BLOCKS, *lists.blocks_left_out(model)]
    if model.attn_pool is not None:
        found += lists.HEAD
    return found


def table_of(model: Any) -> Array:
    """The position table of a NaFlexVit (H0, W0, C), float32."""
    table: Array = model.embeds.pos_embed.detach().float().cpu().numpy()[0]
    return table


def _kept(
    mistake: Mistake,
    made: Sequence[Stages],
    stages: Sequence[Stages],
    order: Sequence[str],
    follow: Callable[[Stages, Stages], Stages],
) -> Iterator[tuple[Mistake, tuple[int, Stages]]]:
    """What is kept of a mistake; see ``known_mistakes``.

    Args:
        mistake: which one.
        made: its stages, for each picture; perhaps not all of them.
        stages: the reference's.
        order: the stages that are looked at.
        follow: from what was made of a picture, and the reference's stages, to all that follows.
    """
    # In a square grid rows and columns are alike, and so are some mistakes: others are better.
    found = []  # (place in the order, whether the grid is square, picture)
    for number, (own, right) in enumerate(zip(made, stages)):
        for place, stage in enumerate(order):
            if stage in own and _shows(stage, own[stage], right[stage]):
                h, w = right["grid"]
                found.append((place, bool(h == w), number))
                break
    if not found:
        return
    place, _, number = min(found)
    whole = follow(made[number], stages[number]) | made[number]
    kept = {}
    for stage in order[place : place + 2]:
        kept[stage] = whole[stage]
    if "pooled" in order:
        kept["pooled"] = whole["pooled"]
    yield mistake, (number, kept)


def _agreed(ours: Sequence[Stages], theirs: Sequence[Stages]) -> list[str]:
    """The stages before the first at which two towers differ by more than rounding."""
    agreed: list[str] = []
    for stage in theirs[0]:
        for own, other in zip(ours, theirs):
            if _shows(stage, own[stage], other[stage]):
                return agreed
        agreed.append(stage)
    return agreed


def _shows(stage: str, ours: Array, theirs: Array) -> bool:
    """Whether a mistake's numbers are beyond rounding."""
    if ours.shape != theirs.shape:
        return True
    scale = 1.0 if stage in ("grid", "pixels") else float(np.abs(theirs).max())
    return bool(np.abs(ours - theirs).max() > 2 * float32_limit(stage) * scale)


def as_trained(model: Any, pipeline: Pipeline) -> Pipeline:
    """timm's pipeline, with the table resampled as SigLIP-2 was trained, whatever timm's settings."""

    def tower(inputs: Inputs) -> Mapping[str, Tensor]:
        with temporarily(model.embeds, TRAINED):
            return pipeline.tower(inputs)

    return pipeline._replace(tower=tower)
