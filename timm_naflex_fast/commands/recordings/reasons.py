"""Why does a port part at a stage? The known mistake whose numbers it has; else what differs.

Tests: tests/commands/recordings/test_compare.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .conventions import Convention, conventions
from .format import PRECISIONS, Array, Recording, Stages, sampled
from .rule import Stage, stages_at

MUCH_NEARER = 0.3  # than the reference: so near are a mistake's numbers to the port's
EVIDENCE = 0.1  # limits by which a mistake known of one picture has to be nearer than one of all


@dataclass(frozen=True)
class Reason:
    """Why a port parts, as far as its numbers tell.

    Attributes:
        words: what it is.
        known: whether a known mistake gives the port's numbers.
        pictures: those of the pictures that part in which it was found.
        times: how far the port is from that mistake, in limits of the stage; the worst picture's.
    """

    words: str
    known: bool
    pictures: tuple[int, ...]
    times: float = 0.0


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
    known = list(recorded_reasons(stages, parting, reference, port))
    if first.name == "position_embedding" and reference.table is not None:
        known += convention_reasons(first, parting, reference)

    def distance(reason: Reason) -> float:
        is_of_all = len(reason.pictures) == len(parting)
        return round(reason.times + EVIDENCE * (not is_of_all), 3)

    if known:
        return min(known, key=distance)
    words = precision_hint(first.name, reference, port, precision) or describe(first, parting)
    return Reason(words, False, tuple(parting))


def recorded_reasons(
    stages: Sequence[Stage], parting: Sequence[int], reference: Recording, port: Sequence[Stages]
) -> Iterator[Reason]:
    """The recorded mistakes that give the port's numbers.

    A mistake is kept at the first stage that shows it, and at the end: there a port is looked at
    that did not write the former.
    """
    first, last = stages[0], stages[-1]
    before = reference.order[: reference.order.index(first.name)]
    not_written = set(before).difference(*port)
    for mistake in reference.about["mistakes"]:
        does_not_show = set(range(reference.about["mistakes_tried"])).difference(
            mistake["pictures"]
        )
        if does_not_show.intersection(parting):
            continue
        if mistake["stage"] == first.name:
            stage = first
        elif mistake["stage"] in not_written:
            stage = last
        else:
            continue
        found = reason_if(mistake["words"], stage, parting, numbers_of(mistake, stage, reference))
        # A grid is two numbers, which many mistakes give: the pixels have to be this one's, too.
        if found and stage.name == "grid" and not has_pixels_of(mistake, stages, reference):
            continue
        if found:
            yield found


def numbers_of(
    mistake: Mapping[str, Any], stage: Stage, reference: Recording
) -> Iterator[tuple[int, Array]]:
    """The port's pictures of which a mistake's numbers at a stage are recorded, and these."""
    for picture in stage.port:
        name = f"{mistake['name']}/{picture:03}.{stage.name}"
        if name in reference.mistakes:
            yield picture, reference.mistakes[name]


def has_pixels_of(
    mistake: Mapping[str, Any], stages: Sequence[Stage], reference: Recording
) -> bool:
    """Whether the port wrote pixels, and they are those of a mistake."""
    for stage in stages:
        if stage.name == "pixels":
            numbers = numbers_of(mistake, stage, reference)
            return all(stage.times(picture, mistaken) <= 1 for picture, mistaken in numbers)
    return False


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
    """Which wider precisions' rounding explains the first stage that parts, in words."""
    names = []
    for wider in PRECISIONS[PRECISIONS.index(precision) + 1 :]:
        rows = [stage.row() for stage in stages_at(wider, reference, port) if stage.name == first]
        if not rows[0].parting:
            names.append(wider)
    if not names:
        return None
    which = " or ".join(names[:-1] or names)  # the last one is the widest
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
    for measure, numbers in stage.differences(picture, theirs).items():
        beyond = np.flatnonzero(numbers > stage.limits[measure])
        if measure in ("token", "channel") and 0 < beyond.size < numbers.size:
            words += f"; in picture {picture:03} {beyond.size} of {numbers.size} {measure}s differ"
            words += f" (first: {beyond[0]})"
    return words
