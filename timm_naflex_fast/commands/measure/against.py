"""timm's NaFlex SigLIP-2 against transformers' Siglip2: the same pictures, the same weights.

What ``record`` and ``compare`` do, in one process: transformers is the reference, timm under each
mode is a port.
"""

from collections.abc import Sequence
from dataclasses import replace

from ...names import STRATEGY_NAMES
from ..recordings.compare import Comparison, compare_recordings
from ..recordings.format import Recording, Stages
from ..recordings.mistakes import mistakes_of
from .contenders import BASELINE
from .pipelines import Pictures, Pipeline, Source, timm_pipeline
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
        own = pictures if is_read else []
        found[name] = compared(pipeline, reference, own)
        first = found[name].first
        if first:
            # Only now a reason is needed, and no mistake behind this stage is one.
            order = ["picture", *reference.order]
            possible = order[: order.index(first.stage) + 1]
            mistakes = mistakes_of(len(source.model.blocks))
            mistakes = [mistake for mistake in mistakes if mistake.start in possible]
            known = with_mistakes(reference, source.model, pictures, mistakes)
            found[name] = compared(pipeline, known, own)
    return found


def compared(pipeline: Pipeline, reference: Recording, pictures: Pictures) -> Comparison:
    """Compare timm's tower from the reference's pixels, and before it what timm reads of ``pictures``."""
    inputs = inputs_of(reference.stages, reference.about["max_patches"])
    made = pipeline.tower(inputs)
    tower = compare_recordings(reference, [chosen(one, read=False) for one in made])
    if not pictures:
        return replace(tower, not_written=[])
    made = pipeline.tower(pipeline.read(pictures))
    read = compare_recordings(reference, [chosen(one, read=True) for one in made])
    return replace(
        tower,
        rows=[*read.rows, *tower.rows],
        reason=read.reason or tower.reason,
        not_written=[],
    )


def chosen(stages: Stages, read: bool) -> Stages:
    """The stages that a pipeline makes of the picture itself, or those that its tower computes."""
    return {stage: stages[stage] for stage in stages if (stage in READ) == read}
