"""Make a recording: a pipeline's stages, what rounding may move there, and known mistakes."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attributes import temporarily
from ..recordings import mistakes
from ..recordings.format import (
    FORMAT,
    VERSION,
    Array,
    Recording,
    Stages,
    float32_limit,
    stage_entry,
)
from ..recordings.mistakes import Mistake, mistakes_of
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
    return len(HALF_TYPES) + 1 + len(mistakes_of(model))


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
        The mistake; the first picture that shows it, not square if there is one; and its numbers
        there, at the first stage that shows it, the next one, and "pooled". Nothing of a mistake
        that does not show, nor of stages from the one on where the twin differs itself: it has
        another activation, say.
    """
    inputs = inputs_of(stages, source.max_patches)
    twins = stages_of(inputs, source.twin(source.model).tower(inputs))
    order = _agreed(twins, stages)
    # In a square grid rows and columns are alike, and so are some mistakes: others are better.
    numbers = sorted(range(len(stages)), key=lambda number: _is_square(stages[number]))
    for mistake in mistakes_of(source.model):
        for number in numbers:
            made = _made(mistake, source, pictures[number], stages[number])
            kept = _kept(made, stages[number], order)
            if kept:
                yield mistake, (number, kept)
                break
        advance(1)


def _is_square(stages: Stages) -> bool:
    h, w = stages["grid"]
    return bool(h == w)


def _made(mistake: Mistake, source: Source, image: Any, right: Stages) -> Stages:
    """The stages of one picture with a mistake; none where this model cannot make it.

    Args:
        mistake: which one.
        source: of the reference.
        image: the picture, RGB.
        right: the reference's stages.
    """
    model = source.model
    length = source.max_patches
    if mistake.padding and len(right["pixels"]) == length:
        return {}
    if mistake.padding == "twice":
        length *= 2

    given = right
    making: Any = nullcontext()
    if mistake.where in ("image", "patches", "kernel"):
        size = model.embeds.patch_size[0]
        picture = mistakes.Picture(image, size, source.max_patches, source.filter, right)
        given = mistakes.read(mistake, picture)
        if not any(_shows(stage, given[stage], right[stage]) for stage in given):
            return {}  # pixels that are right within rounding, though their sums differ by more
    elif mistake.where == "position":
        position = mistake.change(table_of(model), *map(int, right["grid"]))
        making = _embedded(model, right["patch_embedding"] + position)
    else:
        making = mistakes.making(mistake, model)

    inputs = inputs_of([given], length)
    try:
        with making:
            outputs = source.twin(model).tower(inputs)
    except (RuntimeError, AttributeError):
        return {}  # it has no bias, or a number of heads that does not divide its width
    (made,) = stages_of(inputs, outputs)
    if mistake.where == "kernel":
        made["pixels"] = right["pixels"]
    return made


@contextmanager
def _embedded(model: Any, tokens: Array) -> Iterator[None]:
    """Inside, these are the embedded tokens (h * w, C) of the one picture that ``model`` takes."""
    valid = torch.from_numpy(tokens.astype(np.float32))

    def replace(_: Any, __: Any, output: Any) -> Any:
        whole, *more = output  # (1, N, C)
        whole[0, : len(valid)] = valid
        return whole, *more

    with model.embeds.register_forward_hook(replace):
        yield


def table_of(model: Any) -> Array:
    """The position table of a NaFlexVit (H0, W0, C), float32."""
    table: Array = model.embeds.pos_embed.detach().float().cpu().numpy()[0]
    return table


def _kept(made: Stages, right: Stages, order: Sequence[str]) -> Stages:
    """Of a mistake's stages those that are kept, see ``known_mistakes``; none if it does not show."""
    kept = {}
    for stage in order:
        if stage not in made:
            break
        if kept or _shows(stage, made[stage], right[stage]):
            kept[stage] = made[stage]
        if len(kept) == 2:
            break
    if kept and "pooled" in order:
        kept["pooled"] = made["pooled"]
    return kept


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
