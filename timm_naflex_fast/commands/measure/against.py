"""timm's NaFlex SigLIP-2 against transformers' Siglip2: the same pictures, the same weights.

What ``record`` and ``compare`` do, in one process: transformers is the reference, timm under each
mode is a port.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...names import STRATEGY_NAMES
from ..recordings.compare import Comparison, compare_recordings, compare_stage
from ..recordings.format import Port, Recording, Stages
from .checkpoints import read_config
from .contenders import BASELINE
from .pipelines import (
    Pictures,
    Pipeline,
    build_processor,
    build_tower,
    stages_of,
    timm_pipeline,
    transformers_pipeline,
)
from .record import inputs_of, make_recording, transformers_source

READ = ("grid", "pixels")  # the stages that a pipeline makes of the picture itself


def against_transformers(
    model: Any,
    pictures: Pictures,
    *,
    folder: str | Path | None = None,
    contenders: Sequence[str] = STRATEGY_NAMES,
    max_seq_len: int = 256,
    interpolation: str | None = None,
    same_patches: bool = False,
    advance: Callable[[float], Any] = lambda parts: None,
) -> dict[str, Comparison]:
    """Compare timm's pipeline with transformers', stage by stage, in float32 on the CPU.

    Args:
        model: a NaFlexVit of SigLIP-2's design in eval mode and float32; transformers' tower gets
            its weights.
        pictures: PIL images in RGB.
        folder: where transformers' settings of the tower and of the processor may lie.
        contenders: the modes to measure beside timm's own code.
        max_seq_len: most patches of a picture.
        interpolation: timm's filter of the resize, in place of the data configuration's.
        same_patches: pictures are not read by timm; both towers get transformers' patches.
        advance: called with 1 after each known mistake.

    Returns:
        The comparison of timm's own code, then of each mode.

    Raises:
        ImportError: transformers is not installed.
        RuntimeError: transformers has no Siglip2, or its settings are those of other weights.
        ValueError: another design.
    """
    config = read_config(Path(folder)) if folder else {}
    processor = build_processor(model, max_seq_len, folder)
    theirs = transformers_pipeline(build_tower(model, config), processor)
    source = transformers_source(theirs, processor, model, max_seq_len)
    names = [str(number) for number in range(len(pictures))]
    reference = make_recording(source, pictures, names, {}, advance)
    found = {}
    for name in dict.fromkeys([BASELINE, *contenders]):
        pipeline = timm_pipeline(model, max_seq_len, interpolation, name)
        # A mode changes nothing of how pictures are read: of the modes, the towers are compared.
        is_read = name == BASELINE and not same_patches
        found[name] = _compare(pipeline, reference, pictures if is_read else [])
    return found


def _compare(pipeline: Pipeline, reference: Recording, pictures: Pictures) -> Comparison:
    """What timm makes of ``pictures``; its tower begins with the other library's pixels."""
    inputs = inputs_of(reference.stages, reference.about["max_patches"])
    towers = [_without_read(one) for one in stages_of(inputs, pipeline.tower(inputs))]
    tower = compare_recordings(reference, Port(towers))
    if not pictures:
        return tower
    own = pipeline.read(pictures)
    whole = stages_of(own, pipeline.tower(own))
    read = compare_recordings(reference, Port([{one: made[one] for one in READ} for made in whole]))
    # A rounded pixel moves what follows, and nothing tells by how much it may.
    last = compare_stage(reference.order[-1], float("inf"), reference.stages, whole)
    rows = [*read.rows, *tower.rows]
    if last is not None:
        rows.append(replace(last, stage=f"{last.stage} (end to end)"))
    return replace(read, rows=rows, reason=read.reason or tower.reason, missing=[])


def _without_read(stages: Stages) -> Stages:
    """The stages that a tower computes."""
    return {stage: stages[stage] for stage in stages if stage not in READ}
