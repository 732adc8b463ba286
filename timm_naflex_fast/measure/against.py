"""timm's NaFlex SigLIP-2 against transformers' Siglip2: the same pictures, the same weights."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..names import STRATEGY_NAMES
from ..recordings.compare import Comparison, Reason, Row, describe, nearest_mistake
from ..recordings.format import Array, Stages, float32_limit
from ..recordings.verdict import cells
from .checkpoints import read_config
from .contenders import BASELINE
from .pipelines import (
    LIBRARY,
    Inputs,
    Pictures,
    Pipeline,
    build_processor,
    build_tower,
    stages_of,
    timm_pipeline,
    transformers_pipeline,
)
from .record import Source, known_mistakes, transformers_source

END_TO_END = " (end to end)"
LIMITS = (
    "Beyond rounding: another grid; a pixel off by more than two grey levels of 255 (two right "
    "resizers round twice each); embeddings by more than 2e-6 of the stage's largest number, what "
    "follows by more than 2e-5. The stages after the pixels begin with the other library's pixels; "
    "the rows that say (end to end) begin with the picture."
)


def against_transformers(
    model: Any,
    batches: Iterable[Pictures],
    *,
    folder: str | Path | None = None,
    contenders: Sequence[str] = STRATEGY_NAMES,
    max_seq_len: int = 256,
    interpolation: str | None = None,
    same_patches: bool = False,
    heads_are_known: bool = True,
    advance: Callable[[float], Any] = lambda share: None,
) -> dict[str, Any]:
    """Compare timm's pipeline with transformers', stage by stage, in float32 on the CPU.

    Args:
        model: a NaFlexVit of SigLIP-2's design in eval mode and float32; transformers' tower gets
            its weights.
        batches: lists of PIL images in RGB.
        folder: where transformers' settings of the tower and of the processor may lie.
        contenders: the modes to measure beside timm's own code.
        max_seq_len: most patches of a picture.
        interpolation: timm's filter of the resize, in place of the data configuration's.
        same_patches: pictures are not read by timm; both towers get transformers' patches.
        heads_are_known: whether something tells the number of attention heads.
        advance: called after each pass over a batch, with its share of the batch's work.

    Returns:
        "library", "version", "stage_from", "pictures" (how many); for timm's own code "stages" (a
        line for each, see :class:`Row`), "first" (the stage that parts, or None), "reason" (words,
        or None); under "modes" "stages" and "first" of each contender; "verdict", in sentences.

    Raises:
        ImportError: transformers is not installed.
        RuntimeError: transformers has no Siglip2, or its settings are those of other weights.
        ValueError: another design.
    """
    config = read_config(Path(folder)) if folder else {}
    processor = build_processor(model, max_seq_len, folder)
    theirs = transformers_pipeline(build_tower(model, config), processor)
    source = transformers_source(theirs, processor, model, max_seq_len)
    names = [*dict.fromkeys([BASELINE, *contenders])]
    pipelines = {name: timm_pipeline(model, max_seq_len, interpolation, name) for name in names}
    comparisons: dict[str, Comparison] = {}
    example: tuple[Any, Stages, Stages] | None = None  # the first picture that parts in timm's code
    example_at = ""  # the stage
    count = 0
    for pictures in batches:
        inputs = theirs.read(pictures)
        reference = stages_of(inputs, theirs.tower(inputs))
        for name, pipeline in pipelines.items():
            ports = _port_stages(pipeline, pictures, inputs, same_patches)
            comparison = comparisons.setdefault(name, _new_comparison(reference[0]))
            for number, (own, right) in enumerate(zip(ports, reference)):
                comparison.add(count + number, _with_end_to_end(right), own)
            if name == BASELINE:
                first = comparison.first()
                if first is not None and first.stage != example_at:
                    # The first picture that parts at this stage is one of this batch.
                    example_at = first.stage
                    number = first.parting[0] - count
                    example = (pictures[number], reference[number], ports[number])
            advance(1 / len(names))
        count += len(pictures)

    timms = comparisons[BASELINE]
    reason = None
    first = timms.first()
    if first is not None and example is not None:
        reason = _reason(first, source, *example)
    modes = {}
    for name, comparison in comparisons.items():
        modes[name] = {
            "stages": [vars(row) for row in comparison.rows()],
            "first": _name(comparison.first()),
        }
    found = {
        "library": LIBRARY,
        "version": version(LIBRARY),
        "stage_from": "patches" if same_patches else "pictures",
        "pictures": timms.pictures,
        **modes.pop(BASELINE),
        "reason": reason and reason.words,
        "heads_are_known": heads_are_known,
        "modes": modes,
    }
    return found | {"verdict": verdict(found)}


def _new_comparison(reference: Stages) -> Comparison:
    """A comparison of the reference's stages; the end-to-end ones are the last."""
    limits = {stage: {"float32": float32_limit(stage)} for stage in reference}
    last = [stage for stage in _with_end_to_end(reference) if stage not in reference]
    for stage in last:
        # A rounded pixel moves what follows, and nothing tells by how much it may.
        limits[stage] = {"float32": float("inf")}
    return Comparison([*reference, *last], limits)


def _with_end_to_end(stages: Stages) -> Stages:
    """The stages, and the last one once more under the name of the end-to-end row."""
    last = list(stages)[-1]
    return stages | {last + END_TO_END: stages[last]}


def _port_stages(
    pipeline: Pipeline, pictures: Pictures, inputs: Inputs, same_patches: bool
) -> list[Stages]:
    """timm's stages from the other library's pixels; grid and pixels, and the last stage once more,
    from the pictures."""
    ports = stages_of(inputs, pipeline.tower(inputs))
    if same_patches:
        for port in ports:
            del port["grid"], port["pixels"]
        return ports
    own = pipeline.read(pictures)
    end_to_end = stages_of(own, pipeline.tower(own))
    for port, whole in zip(ports, end_to_end):
        last = list(whole)[-1]
        port |= {
            "grid": whole["grid"],
            "pixels": whole["pixels"],
            last + END_TO_END: whole[last],
        }
    return ports


def _reason(row: Row, source: Source, image: Any, right: Stages, own: Stages) -> Reason:
    """Why timm's own code parts at a stage: each known mistake is run on one picture.

    It can be timm's, or the other library's: its settings are those of other weights, say.
    """
    picture, *_ = row.parting
    candidates = _mistaken(source, image, right, row.stage)
    nearest = nearest_mistake(row, picture, right, own, candidates)
    if nearest and nearest.known:
        return nearest

    timms = right | {stage: own[stage] for stage in right if stage in own}
    if row.stage not in ("grid", "pixels"):
        # Both towers began with these.
        timms |= {"grid": right["grid"], "pixels": right["pixels"]}
    exchanged = replace(source, twin=lambda one: timm_pipeline(one, source.max_patches))
    candidates = _mistaken(exchanged, image, timms, row.stage)
    nearest = nearest_mistake(row, picture, timms, right, candidates)
    if nearest and nearest.known:
        return replace(nearest, words=f"{LIBRARY} gives what timm would with this: {nearest.words}")
    return describe(row, picture, right, own)


def _mistaken(
    source: Source, image: Any, stages: Stages, stage: str
) -> Iterator[tuple[str, Array]]:
    """What each known mistake makes of a picture at a stage: words and numbers."""
    for mistake, _, numbers in known_mistakes(source, [image], [stages]):
        if stage in numbers:
            yield mistake.words, numbers[stage]


def _name(row: Row | None) -> str | None:
    return None if row is None else row.stage


def stage_rows(found: Mapping[str, Any]) -> list[dict[str, str]]:
    """The table of stages of timm's own code, as text under its headings."""
    return [cells(Row(**stage)) for stage in found["stages"]]


def verdict(found: Mapping[str, Any]) -> str:
    """The answer in sentences: where timm's own code parts from the library, then each mode."""
    library = f"{found['library']} {found['version']}"
    text = f"timm and {library} {_parting(found)}"
    if found["reason"]:
        text += f"; the likely reason: {found['reason']}"
    text += "."
    for mode, one in found["modes"].items():
        if one["first"] != found["first"]:
            text += f" With {mode} they {_parting({**found, **one})}."
    if not found["heads_are_known"]:
        text += (
            " The number of attention heads is not known: no file tells it, and both sides were "
            "given the same guess."
        )
    return text


def _parting(found: Mapping[str, Any]) -> str:
    rows = [Row(**stage) for stage in found["stages"]]
    for row in rows:
        if row.stage == found["first"]:
            return (
                f"part at {row.stage}, in {len(row.parting)} of {row.compared} pictures (largest "
                f"difference {row.largest:.2g})"
            )
    text = f"part nowhere on {found['pictures']} pictures in float32"
    *_, last = (row for row in rows if not row.stage.endswith(END_TO_END))
    text += (
        f": from the same pixels, {last.stage} differs by {last.share:.1e} of its largest number"
    )
    for row in rows:
        if row.stage.endswith(END_TO_END):
            text += f"; end to end, from each one's own pixels, by {row.share:.1e}"
    return text
