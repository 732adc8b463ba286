"""timm's NaFlex SigLIP-2 against transformers' Siglip2: the same pictures, the same weights.

What ``record`` and ``compare`` do, in one process: transformers is the reference, timm under each
mode is a port.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from vit_ports.compare import Comparison, compare_recordings
from vit_ports.mistakes import TRIED, mistakes_of, with_mistakes

from ...names import STRATEGY_NAMES
from .contenders import BASELINE
from .pipelines import Pictures, Source, siglip2_weights, timm_source
from .record import make_recording


def against_transformers(
    source: Source,
    pictures: Pictures,
    *,
    contenders: Sequence[str] = STRATEGY_NAMES,
    interpolation: str | None = None,
    same_patches: bool = False,
) -> dict[str, Comparison]:
    """Compare timm's pipeline with transformers', stage by stage, in float32 on the CPU.

    timm's own code reads the pictures; but its tower, and that of each mode, goes on from
    transformers' pixels.

    Args:
        source: transformers' pipeline, see :func:`transformers_source`.
        pictures: PIL images in RGB. All their stages are held at once.
        contenders: the modes to measure beside timm's own code.
        interpolation: timm's filter of the resize, in place of the data configuration's.
        same_patches: pictures are not read by timm.

    Returns:
        The comparison of timm's own code, then of each mode.
    """
    reference = make_recording(source, pictures, [""] * len(pictures), {})
    found = {}
    for name in dict.fromkeys([BASELINE, *contenders]):
        timm = timm_source(source.model, source.max_patches, interpolation, name)
        port = timm.tower(reference.stages)
        if name == BASELINE and not same_patches:
            for own, read in zip(port, timm.read(pictures)):
                own.update(read)
        found[name] = compare_recordings(reference, port)
        first = found[name].first
        if first:
            # Only now a reason is needed. Known mistakes are run to this stage: one that begins
            # behind it is no reason, and gives nothing. The pixels tell mistakes of one grid apart.
            place = reference.order.index(first.stage)
            seen = max(place, reference.order.index("pixels")) + 1
            beginning = [dict(islice(own.items(), seen)) for own in reference.stages]
            weights = siglip2_weights(source.model)
            until_there = replace(reference, stages=beginning)
            mistakes = mistakes_of(len(source.model.blocks))
            known = with_mistakes(until_there, weights, pictures[:TRIED], mistakes)
            found[name] = compare_recordings(replace(known, stages=reference.stages), port)
    return found
