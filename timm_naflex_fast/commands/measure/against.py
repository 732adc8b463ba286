"""timm's NaFlex SigLIP-2 against transformers' Siglip2: the same pictures, the same weights.

What ``record`` and ``compare`` do, in one process: transformers is the reference, timm under each
mode is a port.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np

from ...names import STRATEGY_NAMES
from ..recordings.compare import Comparison, compare_recordings
from ..recordings.format import Recording, Stages, float32_limits
from ..recordings.mistakes import mistakes_of
from ..recordings.rule import Row, Stage, channel_sizes
from .contenders import BASELINE
from .pipelines import Pictures, Pipeline, Source, stages_of, timm_pipeline
from .record import inputs_of, make_recording, with_mistakes

READ = ("grid", "pixels")  # the stages that a pipeline makes of the picture itself


def against_transformers(
    source: Source,
    pictures: Pictures,
    *,
    contenders: Sequence[str] = STRATEGY_NAMES,
    interpolation: str | None = None,
    same_patches: bool = False,
) -> dict[str, Comparison]:
    """Compare timm's pipeline with transformers', stage by stage, in float32 on the CPU.

    Args:
        source: transformers' pipeline, see :func:`transformers_source`.
        pictures: PIL images in RGB. All their stages are held at once.
        contenders: the modes to measure beside timm's own code.
        interpolation: timm's filter of the resize, in place of the data configuration's.
        same_patches: pictures are not read by timm; both towers get transformers' patches.

    Returns:
        The comparison of timm's own code, then of each mode.
    """
    reference = make_recording(source, pictures, [""] * len(pictures), {})
    found = {}
    for name in dict.fromkeys([BASELINE, *contenders]):
        pipeline = timm_pipeline(source.model, source.max_patches, interpolation, name)
        # A mode changes nothing of how pictures are read: of the modes, the towers are compared.
        is_read = name == BASELINE and not same_patches
        port = port_of(pipeline, reference, pictures if is_read else [])
        found[name] = compared(port, reference)
        first = found[name].first
        if first:
            # Only now a reason is needed, and no mistake behind this stage is one.
            order = ["picture", *reference.order]
            until = order.index(first.stage)
            mistakes = []
            for mistake in mistakes_of(len(source.model.blocks)):
                if order.index(mistake.start) <= until:
                    mistakes.append(mistake)
            known = with_mistakes(reference, source.model, pictures, mistakes)
            found[name] = compared(port, known)
    return found


class Port(NamedTuple):
    """What timm makes of pictures: its tower of the other library's pixels, and all on its own."""

    tower: list[Stages]
    own: list[Stages]  # none where timm reads no pictures


def port_of(pipeline: Pipeline, reference: Recording, pictures: Pictures) -> Port:
    """Run timm on the reference's pixels and, where there are some, on pictures."""
    inputs = inputs_of(reference.stages, reference.about["max_patches"])
    tower = []
    for made in stages_of(inputs, pipeline.tower(inputs)):
        tower.append({stage: made[stage] for stage in made if stage not in READ})
    if not pictures:
        return Port(tower, [])
    read = pipeline.read(pictures)
    return Port(tower, stages_of(read, pipeline.tower(read)))


def compared(port: Port, reference: Recording) -> Comparison:
    """Compare what timm read, then its tower from the same pixels; and what it gives in the end."""
    tower = replace(compare_recordings(reference, port.tower), not_written=[])
    if not port.own:
        return tower
    own = [{stage: made[stage] for stage in READ} for made in port.own]
    read = compare_recordings(reference, own)
    rows = [*read.rows, *tower.rows, end_to_end(port, reference)]
    return replace(tower, rows=rows, reason=read.reason or tower.reason)


def end_to_end(port: Port, reference: Recording) -> Row:
    """The last stage from timm's own pixels, which nothing judges.

    A rounded pixel moves what follows, and nothing tells by how much it may.
    """
    last = reference.order[-1]
    right = [own[last] for own in reference.stages]
    made = {number: np.float64(own[last]) for number, own in enumerate(port.own)}
    sizes = channel_sizes(last, right, reference.about["std"])
    limits = dict.fromkeys(float32_limits(last), inf)
    row = Stage(last, right, made, sizes, limits).row()
    return replace(row, stage=f"{last} (end to end)")
