"""Why does a port part at a stage? The known mistake whose numbers it has; else what differs.

Tests: tests/commands/recordings/test_compare.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .compare import Reason, Stage, differences, stages_at
from .conventions import Convention, conventions
from .format import PRECISIONS, Array, Recording, Stages, sampled

MUCH_NEARER = 0.3  # than the reference: so near are a mistake's numbers to the port's
EVIDENCE = 0.1  # limits by which a mistake known of one picture has to be nearer than one of all


def reason_of(
    stages: Sequence[Stage],
    parting: Sequence[int],
    reference: Recording,
    port: Sequence[Stages],
    precision: str,
) -> Reason:
    """Why a port parts at a stage.

    Args:
        stages: those that the port wrote, from the one on where it parts first.
        parting: the pictures that part there.
        reference: the recording.
        port: the port's stages of each picture.
        precision: that of the port.
    """
    first = stages[0]
    known = []
    for mistake in possible_mistakes(first.name, reference, port):
        found = recorded_reason(mistake, stages, parting, reference)
        if found and (first.name != "grid" or has_its_pixels(mistake, stages, reference)):
            known.append(found)
    if first.name == "position_embedding" and reference.table is not None:
        known += convention_reasons(first, parting, reference)
    if known:
        return nearest(known, len(parting))
    words = precision_hint(first.name, reference, port, precision) or describe(first, parting)
    return Reason(words, False, tuple(parting))


def nearest(known: Sequence[Reason], count: int) -> Reason:
    """The reason whose numbers are nearest to the port's; ``count``: how many pictures part."""

    def distance(reason: Reason) -> float:
        penalty = 0.0 if len(reason.pictures) == count else EVIDENCE
        return round(reason.times + penalty, 3)

    return min(known, key=distance)


def possible_mistakes(
    first: str, reference: Recording, port: Sequence[Stages]
) -> Iterator[Mapping[str, Any]]:
    """The recorded mistakes that can show at the stage ``first`` and at none before.

    Those that show at a stage before which the port wrote are none of its: it does not part there.
    """
    written = {name for own in port for name in own}
    before = reference.order[: reference.order.index(first)]
    for mistake in reference.about["mistakes"]:
        shows = mistake["stage"]
        if shows == first or (shows in before and shows not in written):
            yield mistake


def recorded_reason(
    mistake: Mapping[str, Any],
    stages: Sequence[Stage],
    parting: Sequence[int],
    reference: Recording,
) -> Reason | None:
    """The mistake as a reason, if it gives the port's numbers.

    A mistake is kept at the first stage that shows it and at the end, so a port that did not write
    the former is looked at there.
    """
    for picture in parting:
        was_tried = picture < reference.about["mistakes_tried"]
        if was_tried and picture not in mistake["pictures"]:
            return None  # the mistake does not show in this picture
    for stage in (stages[0], stages[-1]):
        numbers = recorded_numbers(mistake, stage, reference)
        if numbers:
            return reason_if(mistake["words"], stage, parting, numbers)
    return None


def has_its_pixels(
    mistake: Mapping[str, Any], stages: Sequence[Stage], reference: Recording
) -> bool:
    """Whether the port has the pixels of a mistake, too: many give the same two numbers of a grid."""
    for stage in stages:
        if stage.name == "pixels":
            numbers = recorded_numbers(mistake, stage, reference)
            return all(stage.times(picture, mistaken) <= 1 for picture, mistaken in numbers)
    return False


def recorded_numbers(
    mistake: Mapping[str, Any], stage: Stage, reference: Recording
) -> list[tuple[int, Array]]:
    """The port's pictures of which a mistake's numbers at a stage are recorded, and these."""
    found = []
    for picture in stage.port:
        name = f"{mistake['name']}/{picture:03}.{stage.name}"
        if name in reference.mistakes:
            found.append((picture, reference.mistakes[name]))
    return found


def reason_if(
    words: str, stage: Stage, parting: Sequence[int], numbers: Iterable[tuple[int, Array]]
) -> Reason | None:
    """The reason ``words``, if the port has these numbers in each of their pictures.

    And if they are much nearer to the port's than the reference's are, where the port parts.
    """
    pictures = []
    farthest = 0.0
    for picture, mistaken in numbers:
        times = stage.times(picture, mistaken)
        if times > 1:
            return None
        if picture not in parting:
            continue
        right = stage.reference[picture]
        if len(mistaken) < len(right):
            right = sampled(right)
        if times > MUCH_NEARER * stage.times(picture, right):
            return None
        pictures.append(picture)
        farthest = max(farthest, times)
    if not pictures:
        return None
    return Reason(words, True, tuple(pictures), farthest)


def convention_reasons(
    stage: Stage, parting: Sequence[int], reference: Recording
) -> Iterator[Reason]:
    """The conventions of resampling by which the port's table was resized, in every picture."""
    table = np.asarray(reference.table, np.float64)
    sizes = {}
    for picture in stage.port:
        h, w = map(int, reference.stages[picture]["grid"])
        sizes[picture] = (1, h, w)

    def embeddings(convention: Convention) -> Iterator[tuple[int, Array]]:
        for picture, size in sizes.items():
            added = convention.tokens(table, [size])  # (h * w, C)
            yield picture, reference.stages[picture]["patch_embedding"] + added

    for convention in conventions(list(sizes.values())):
        words = f"the table is resampled otherwise: {convention.words()}"
        found = reason_if(words, stage, parting, embeddings(convention))
        if found:
            yield found


def precision_hint(
    first: str, reference: Recording, port: Sequence[Stages], precision: str
) -> str | None:
    """Which wider precision's rounding explains the first stage that parts, in words."""
    names = []
    for wider in PRECISIONS[PRECISIONS.index(precision) + 1 :]:
        for stage in stages_at(wider, reference, port):
            if stage.name == first and not stage.row().parting:
                names.append(wider)
    if not names:
        return None
    if len(names) > 1:
        names.remove("bfloat16")  # which is the widest
    which = " or ".join(names)
    return (
        f"as large as {which}'s rounding: if the port computes in it, or its weights were rounded "
        f"to it, say --precision {which}"
    )


def describe(stage: Stage, parting: Sequence[int]) -> str:
    """Which of a port's numbers differ at a stage, in words."""
    picture = parting[0]
    ours, theirs = stage.port[picture], stage.reference[picture]
    if stage.name == "grid":
        return f"the grid is {tuple(map(int, ours))}, not {tuple(map(int, theirs))}"
    factor = float((ours * theirs).sum()) / float((theirs * theirs).sum() or 1.0)
    if all(stage.times(one, factor * stage.reference[one]) <= 1 for one in parting):
        return f"every number is {factor:.6g} times the reference's"
    words = "no known mistake gives these numbers"
    found = differences(stage.name, ours, theirs, stage.sizes)
    for measure, numbers in found.items():
        beyond = np.flatnonzero(numbers > stage.limits[measure])
        if measure in ("token", "channel") and 0 < beyond.size < numbers.size:
            words += f"; in picture {picture:03} {beyond.size} of {numbers.size} {measure}s differ"
            words += f" (first: {beyond[0]})"
    return words
