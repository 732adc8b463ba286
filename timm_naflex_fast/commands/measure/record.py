"""Make a recording: a pipeline's stages, what rounding may move there, and known mistakes.

Tests: tests/commands/cli/test_record.py.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import einx
import numpy as np
import torch

from ..recordings.compare import PIXELS_ARE_ONES, scale_of
from ..recordings.format import (
    FORMAT,
    VERSION,
    Array,
    Recording,
    Stages,
    float32_limit,
    stage_entry,
)
from ..recordings.mistakes import Mistake, by_pillow, making, mistakes_of
from .contenders import BASELINE
from .pipelines import (
    LIBRARY,
    Inputs,
    Pictures,
    Pipeline,
    stages_of,
    timm_pipeline,
)

ROOM = 3.0  # times what half a precision moved: another port rounds at other places
PIXEL_ROOM = 2.0  # times what random grey levels moved
GREY_LEVEL = 2 / 255
TWO_SIDES = 2.0  # times what float32 rounds: the twin rounds, and so does the reference
BATCH = 8  # pictures that are run together; limits and mistakes are measured on the first ones
Found = tuple[Mistake, int, Stages]  # the picture that shows it, what it gives there
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
        words: which pipeline it is.
        pipeline: the reference.
        twin: from a timm model to timm's pipeline of the same numbers, which runs the mistakes.
        model: the timm NaFlexVit that holds the weights.
        max_patches: most patches of a picture.
        filter: of the resize of pictures.
    """

    words: str
    pipeline: Pipeline
    twin: Callable[[Any], Pipeline]
    model: Any
    max_patches: int
    filter: str


def timm_source(
    model: Any,
    max_patches: int,
    interpolation: str | None = None,
    contender: str = BASELINE,
) -> Source:
    """timm's pipeline; the arguments are those of :func:`timm_pipeline`."""
    from timm.data import resolve_data_config

    def twin(one: Any) -> Pipeline:
        return timm_pipeline(one, max_patches, interpolation, contender)

    config = resolve_data_config({"interpolation": interpolation}, model=model)
    words = f"timm, {contender}"
    return Source(words, twin(model), twin, model, max_patches, config["interpolation"])


def transformers_source(pipeline: Pipeline, processor: Any, model: Any, max_patches: int) -> Source:
    """transformers' pipeline, with its image processor and the weights of timm's ``model``."""
    from PIL.Image import Resampling

    def twin(one: Any) -> Pipeline:
        # As transformers and SigLIP-2's training resize, whatever timm's settings are.
        return timm_pipeline(one, max_patches, settings=TRAINED)

    words = f"{LIBRARY} {version(LIBRARY)}"
    filter_name = Resampling(processor.resample).name.lower()
    return Source(words, pipeline, twin, model, max_patches, filter_name)


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
        advance: called with 1 after each mistake.
    """
    stages: list[Stages] = []
    for start in range(0, len(pictures), BATCH):
        inputs = source.pipeline.read(pictures[start : start + BATCH])
        stages += stages_of(inputs, source.pipeline.tower(inputs))
    limits = measure_limits(source, stages[:BATCH])
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


def describe_mistakes(found: Iterable[Found]) -> tuple[list[dict[str, Any]], Stages]:
    """The entries of recording.json for mistakes, and the arrays of mistakes.safetensors."""
    entries = []
    arrays = {}
    for mistake, picture, numbers in found:
        first, *_ = numbers
        entry = {"name": mistake.name, "words": mistake.words, "stage": first, "picture": picture}
        entries.append(entry)
        for stage, array in numbers.items():
            if stage == "pixels":
                array = array.astype(np.float16)  # grey levels need no more
            arrays[f"{mistake.name}/{picture:03}.{stage}"] = array
    return entries, arrays


def measure_limits(source: Source, stages: Sequence[Stages]) -> dict[str, dict[str, float]]:
    """The largest difference at each stage that counts as rounding, by precision.

    Those of half a precision, and of pixels that another resizer rounded, are measured: the twin
    runs so. They are shares of the stage's largest number.
    """
    limits = {stage: {"float32": float32_limit(stage)} for stage in stages[0]}
    inputs = inputs_of(stages, source.max_patches)
    twin = source.twin(source.model)
    right = stages_of(inputs, twin.tower(inputs))
    for precision, dtype in HALF_TYPES.items():
        half = source.twin(copy.deepcopy(source.model).to(dtype))
        for stage, share in _moved(half, inputs, right).items():
            limits[stage][precision] = max(ROOM * share, limits[stage]["float32"])
        limits["pixels"][precision] = limits["pixels"]["float32"] + torch.finfo(dtype).eps / 2
    # Rounding to whole grey levels moves a pixel by one level.
    generator = torch.Generator().manual_seed(0)
    levels = torch.randint(-1, 2, inputs.pixels.shape, generator=generator)
    noisy = inputs._replace(pixels=(inputs.pixels + levels * GREY_LEVEL).clamp(-1, 1))
    for stage, share in _moved(twin, noisy, right).items():
        limits[stage]["own_pixels"] = PIXEL_ROOM * share
    return limits


def _moved(pipeline: Pipeline, inputs: Inputs, right: Sequence[Stages]) -> dict[str, float]:
    """The largest share by which each stage that a tower computes differs."""
    largest: dict[str, float] = {}
    for ours, theirs in zip(stages_of(inputs, pipeline.tower(inputs)), right):
        for stage in theirs:
            if stage not in PIXELS_ARE_ONES:
                share = _share(stage, ours, theirs)
                largest[stage] = max(largest.get(stage, 0.0), share)
    return largest


def inputs_of(stages: Sequence[Stages], length: int) -> Inputs:
    """What a tower takes: the grids and pixels of pictures, padded to ``length`` patches."""
    grid = torch.tensor(np.array([own["grid"] for own in stages], np.int64))
    valid = torch.arange(length) < grid.prod(1, keepdim=True)  # (B, N)
    pixels = torch.zeros(*valid.shape, stages[0]["pixels"].shape[1])  # (B, N, p * p * 3)
    pixels[valid] = torch.tensor(np.concatenate([own["pixels"] for own in stages]))
    return Inputs(grid, pixels, valid)


def known_mistakes(
    source: Source,
    pictures: Pictures,
    stages: Sequence[Stages],
    advance: Callable[[float], Any] = lambda parts: None,
) -> Iterator[Found]:
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
    order = _agreed(source, stages)
    # In a square grid rows and columns are alike, and so are some mistakes: others are better.
    squares = [np.ptp(own["grid"]) == 0 for own in stages]
    for mistake in mistakes_of(source.model):
        for number in np.argsort(squares, kind="stable"):
            made = _made(mistake, source, pictures[number], stages[number])
            kept = _kept(made, stages[number], order)
            if kept:
                yield mistake, int(number), kept
                break
        advance(1)


def _made(mistake: Mistake, source: Source, picture: Any, right: Stages) -> Stages:
    """The stages of one picture with a mistake; the right ones where it cannot be made.

    Args:
        mistake: which one.
        source: of the reference.
        picture: in RGB.
        right: the reference's stages.
    """
    model = source.model
    length = source.max_patches
    count = len(right["pixels"])
    # Without padding there is nothing that is done wrong with it.
    if mistake.padding and count == length:
        return right
    if mistake.padding == "twice":
        length *= 2

    # What the tower takes.
    given = right
    if mistake.where in ("size", "resize", "image", "patches", "kernel"):
        given = _read(mistake, source, picture, right)
        if not any(_shows(stage, given, right) for stage in given):
            return right  # pixels that are right within rounding, though their sums differ by more

    # What its blocks take in place of its own embedded tokens: none, those of the picture, or all.
    tokens = right["position_embedding"][:0]
    if mistake.where == "position":
        table = table_of(model).astype(np.float64)
        added = mistake.change(table, tuple(map(int, right["grid"])))
        tokens = right["patch_embedding"] + added.reshape(count, -1)
    elif mistake.padding == "transformers":
        first = right["position_embedding"][0] - right["patch_embedding"][0]
        empty = torch.zeros(right["pixels"].shape[1])
        padding = model.embeds.proj(empty).detach().numpy() + first  # (C,)
        tokens = np.stack([*right["position_embedding"], *[padding] * (length - count)])

    tower = source.twin(model).tower
    inputs = inputs_of([given], length)
    try:
        with making(mistake, model), _embedded(model, tokens):
            outputs = tower(inputs)
    except (RuntimeError, AttributeError, TypeError):
        return right  # it has no bias, or a number of heads that does not divide its width
    (made,) = stages_of(inputs, outputs)
    if mistake.where == "kernel":
        made["pixels"] = right["pixels"]
    return made


def _read(mistake: Mistake, source: Source, picture: Any, right: Stages) -> Stages:
    """The grid and the pixels of a picture that is read with a mistake."""
    side = source.model.embeds.patch_size[0]
    sides = {"y": side, "x": side}
    h, w = right["grid"]
    image = einx.id("(h w) (y x c) -> (h y) (w x) c", right["pixels"], h=h, w=w, **sides)
    if mistake.where == "size":
        h, w = mistake.change(source.max_patches)
        image = by_pillow(source.filter)(picture, (h * side, w * side)) / 255 * 2 - 1
    elif mistake.where == "resize":
        image = mistake.change(picture, image.shape[:2]) / 255 * 2 - 1
    elif mistake.where == "image":
        image = mistake.change(image)
    patches = einx.id("(h y) (w x) c -> h w y x c", image, **sides)
    if mistake.where in ("patches", "kernel"):
        patches = mistake.change(patches)
    h, w, *_ = patches.shape
    return {"grid": np.array([h, w]), "pixels": np.float32(patches.reshape(h * w, -1))}


@contextmanager
def _embedded(model: Any, tokens: Array) -> Iterator[None]:
    """Inside, these are the first embedded tokens (n, C) of the one picture that ``model`` takes."""

    def replace(_: Any, __: Any, output: Any) -> Any:
        whole, *more = output  # (1, N, C)
        whole[0, : len(tokens)] = torch.tensor(tokens)
        return whole, *more

    with model.embeds.register_forward_hook(replace):
        yield


def table_of(model: Any) -> Array:
    """The position table of a NaFlexVit (H0, W0, C), float32."""
    table: Array = model.embeds.pos_embed[0].detach().numpy()
    return table


def _kept(made: Stages, right: Stages, order: Sequence[str]) -> Stages:
    """Of a mistake's stages those that are kept, see ``known_mistakes``; none if it does not show."""
    shown = [_shows(stage, made, right) for stage in order]
    if not any(shown):
        return {}
    first = shown.index(True)
    kept = {stage: made[stage] for stage in order[first : first + 2]}
    if "pooled" in order:
        kept["pooled"] = made["pooled"]
    return kept


def _agreed(source: Source, stages: Sequence[Stages]) -> list[str]:
    """The stages before the first at which the twin differs by more than rounding."""
    inputs = inputs_of(stages, source.max_patches)
    moved = _moved(source.twin(source.model), inputs, stages)
    agreed: list[str] = []
    for stage in stages[0]:
        if moved.get(stage, 0.0) > TWO_SIDES * float32_limit(stage):
            break
        agreed.append(stage)
    return agreed


def _shows(stage: str, made: Stages, right: Stages) -> bool:
    """Whether a stage differs by more than rounding."""
    return _share(stage, made, right) > TWO_SIDES * float32_limit(stage)


def _share(stage: str, made: Stages, right: Stages) -> float:
    """The largest difference at a stage, as a share of its largest number."""
    if made[stage].shape != right[stage].shape:
        return float("inf")
    largest = float(np.abs(made[stage] - right[stage]).max())
    return largest / scale_of(stage, right)
