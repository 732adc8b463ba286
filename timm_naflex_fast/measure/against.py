"""timm's NaFlex SigLIP-2 against transformers' Siglip2: the same pictures, the same weights.

What ``record`` and ``compare`` do, in one process: transformers is the reference, timm under each
mode is a port.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..names import STRATEGY_NAMES
from ..recordings.compare import Comparison, Reason, Row, compare_recordings
from ..recordings.format import Stages, float32_limit
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
from .record import Source, make_recording, transformers_source

END_TO_END = " (end to end)"
LIMITS = (
    "Beyond rounding: another grid; a pixel off by more than two grey levels of 255 (two right "
    "resizers round twice each); embeddings by more than 2e-6 of the stage's largest number, what "
    "follows by more than 2e-5. The stages after the pixels begin with the other library's pixels; "
    "the rows that say (end to end) begin with the picture."
)
READ = ("grid", "pixels")  # the stages that a pipeline makes of the picture itself


@dataclass(frozen=True)
class Compared:
    """timm under one mode.

    Attributes:
        stages: a row for each stage.
        first: the stage that parts, or None.
    """

    stages: list[Row]
    first: str | None


@dataclass(frozen=True)
class Against(Compared):
    """timm's own code, and each mode beside it.

    Attributes:
        version: of the other library.
        stage_from: "pictures", or "patches": both towers got the other library's patches.
        pictures: how many were compared.
        reason: the likely one in words, or None.
        known: whether a known mistake gives these numbers; if not, ``reason`` says by what kind of
            difference they part.
        heads_are_known: whether something tells the number of attention heads.
        modes: what each one gives.
        verdict: the answer in sentences.
    """

    version: str
    stage_from: str
    pictures: int
    reason: str | None
    known: bool
    heads_are_known: bool
    modes: dict[str, Compared]
    verdict: str = ""
    library: str = LIBRARY


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
) -> Against:
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
    example: tuple[str, Any, Stages, Stages] | None = None
    count = 0
    for pictures in batches:
        inputs = theirs.read(pictures)
        reference = stages_of(inputs, theirs.tower(inputs))
        for name, pipeline in pipelines.items():
            ports = _port_stages(pipeline, pictures, inputs, same_patches)
            comparison = comparisons.setdefault(name, _new_comparison(reference[0]))
            for number, (own, right) in enumerate(zip(ports, reference)):
                comparison.add(count + number, _with_end_to_end(right), own)
            first = comparison.first()
            # The reason is looked for in the first picture that parts at the first stage. A later
            # batch can part at an earlier stage.
            if name == BASELINE and first and (example is None or example[0] != first.stage):
                number = first.parting[0] - count
                example = (first.stage, pictures[number], reference[number], ports[number])
            advance(1 / len(names))
        count += len(pictures)

    reason = None
    if example is not None:
        reason = _reason(source, pipelines[BASELINE], *example)
    modes = {}
    for name, comparison in comparisons.items():
        first = comparison.first()
        modes[name] = Compared(comparison.rows(), None if first is None else first.stage)
    timms = modes.pop(BASELINE)
    found = Against(
        stages=timms.stages,
        first=timms.first,
        version=version(LIBRARY),
        stage_from="patches" if same_patches else "pictures",
        pictures=count,
        reason=None if reason is None else reason.words,
        known=reason is not None and reason.known,
        heads_are_known=heads_are_known,
        modes=modes,
    )
    return replace(found, verdict=verdict(found))


def _new_comparison(reference: Stages) -> Comparison:
    """A comparison of the reference's stages; the end-to-end one is the last."""
    limits = {stage: {"float32": float32_limit(stage)} for stage in reference}
    *_, last = order = list(_with_end_to_end(reference))
    # A rounded pixel moves what follows, and nothing tells by how much it may.
    limits[last] = {"float32": float("inf")}
    return Comparison(order, limits)


def _with_end_to_end(stages: Stages) -> Stages:
    """The stages, and the last one once more under the name of the end-to-end row."""
    *_, last = stages
    return stages | {last + END_TO_END: stages[last]}


def _port_stages(
    pipeline: Pipeline, pictures: Pictures, inputs: Inputs, same_patches: bool
) -> list[Stages]:
    """timm's stages from the other library's pixels; grid and pixels, and the last stage once more,
    from the pictures."""
    ports = stages_of(inputs, pipeline.tower(inputs))
    if same_patches:
        return [_without_read(port) for port in ports]
    own = pipeline.read(pictures)
    mixed = []
    for port, whole in zip(ports, stages_of(own, pipeline.tower(own))):
        mixed.append(_with_end_to_end(whole) | _without_read(port))
    return mixed


def _without_read(stages: Stages) -> Stages:
    """The stages that a tower computes."""
    return {stage: stages[stage] for stage in stages if stage not in READ}


def _reason(
    source: Source, timms: Pipeline, stage: str, picture: Any, right: Stages, own: Stages
) -> Reason | None:
    """Why timm's own code parts from the source at a stage, by one picture's stages of both.

    It can be timm's, or the other library's: its settings are those of other weights, say. So first
    the one, then the other is recorded with each known mistake.
    """

    def as_timm_is(one: Any) -> Pipeline:
        return timm_pipeline(one, source.max_patches)

    reason = _compare_one(source, picture, stage, own)
    if reason is None or reason.known:
        return reason
    # Where a picture is read right, both towers begin with the other library's pixels.
    read = timms.read if stage in READ else source.pipeline.read
    exchanged = replace(source, pipeline=Pipeline(read, timms.tower), twin=as_timm_is)
    other = _compare_one(exchanged, picture, stage, right)
    if other is not None and other.known:
        return replace(other, words=f"{LIBRARY} gives what timm would with this: {other.words}")
    return reason


def _compare_one(source: Source, picture: Any, stage: str, port: Stages) -> Reason | None:
    """Record one picture in memory, and compare a port that parts at a stage."""
    # Without the table: the other library's own may be the wrong one.
    recording = replace(make_recording(source, [picture], ["the picture"], {}), table=None)
    for entry in recording.about["stages"]:
        entry["limits"] = {"float32": entry["limits"]["float32"]}
    # The stages after the pixels began with the reference's own.
    compared = [one for one in recording.order if one in port and (one in READ) == (stage in READ)]
    _, reasons = compare_recordings(recording, [{one: port[one] for one in compared}])
    return reasons[0] if reasons else None


def stage_rows(found: Against) -> list[dict[str, str]]:
    """The table of stages of timm's own code, as text under its headings."""
    return [cells(row) for row in found.stages]


def verdict(found: Against) -> str:
    """The answer in sentences: where timm's own code parts from the library, then each mode."""
    text = f"timm and {found.library} {found.version} {_parting(found, found.pictures)}"
    if found.reason:
        kind = "the likely reason" if found.known else "the kind of difference"
        text += f"; {kind}: {found.reason}"
    text += "."
    for mode, one in found.modes.items():
        if one.first != found.first:
            text += f" With {mode} they {_parting(one, found.pictures)}."
    if not found.heads_are_known:
        text += (
            " The number of attention heads is not known: no file tells it, and both sides were "
            "given the same guess."
        )
    return text


def _parting(one: Compared, pictures: int) -> str:
    """Where one mode parts."""
    for row in one.stages:
        if row.parting:
            return (
                f"part at {row.stage}, in {len(row.parting)} of {row.compared} pictures (largest "
                f"difference {row.largest:.2g})"
            )
    text = f"part nowhere on {pictures} pictures in float32: from the same pixels, "
    *_, last = one.stages
    if not last.stage.endswith(END_TO_END):
        return f"{text}{last.stage} differs by {last.share:.1e} of its largest number"
    *_, tower, last = one.stages
    return (
        f"{text}{tower.stage} differs by {tower.share:.1e} of its largest number; end to end, from "
        f"each one's own pixels, by {last.share:.1e}"
    )
