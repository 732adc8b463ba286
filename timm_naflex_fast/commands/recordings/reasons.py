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
        times = reason.times
        if len(reason.pictures) != len(parting):
            times += EVIDENCE
        return round(times, 3)

    if known:
        return min(known, key=distance)
    words = precision_hint(first.name, reference, port, precision)
    if words is None:
        words = describe(first, parting)
    return Reason(words, False, tuple(parting))


def recorded_reasons(
    stages: Sequence[Stage], parting: Sequence[int], reference: Recording, port: Sequence[Stages]
) -> Iterator[Reason]:
    """The recorded mistakes that give the port's numbers.

    A mistake is kept at the first stage that shows it, and at the end: there a port is looked at
    that did not write the former.
    """
    first = stages[0]
    last = stages[-1]
    place = reference.order.index(first.name)
    before = reference.order[:place]
    not_written = set(before).difference(*port)
    tried = set(range(reference.about["mistakes_tried"]))
    for mistake in reference.about["mistakes"]:
        # It cannot be this one where a picture parts in which it does not show.
        does_not_show = tried.difference(mistake["pictures"])
        if does_not_show.intersection(parting):
            continue
        if mistake["stage"] == first.name:
            stage = first
        elif mistake["stage"] in not_written:
            stage = last
        else:
            continue
        numbers = numbers_of(mistake, stage, reference)
        found = reason_if(mistake["words"], stage, parting, numbers)
        if found is None:
            continue
        # A grid is two numbers, which many mistakes give: the pixels have to be this one's, too.
        if stage.name != "grid" or has_pixels_of(mistake, stages, reference):
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
            for picture, mistaken in numbers_of(mistake, stage, reference):
                has_its_pixels = stage.times(picture, mistaken) <= 1
                if not has_its_pixels:
                    return False
            return True
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
        # Not "greater than": NaN is nobody's number.
        if not times <= 1:
            return None
        if picture not in parting:
            continue
        right = stage.reference[picture]
        if len(mistaken) < len(right):
            right = sampled(right)
        times_of_right = stage.times(picture, right)
        if times > MUCH_NEARER * times_of_right:
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
        grid = reference.stages[picture]["grid"]
        h, w = map(int, grid)
        sizes[picture] = (1, h, w)

    def embeddings(convention: Convention) -> Iterator[tuple[int, Array]]:
        for picture, size in sizes.items():
            patches = reference.stages[picture]["patch_embedding"]
            added = convention.tokens(table, [size])  # (h * w, C)
            yield picture, patches + added

    all_sizes = list(sizes.values())
    for convention in conventions(all_sizes):
        words = f"the table is resampled otherwise: {convention.words()}"
        found = reason_if(words, stage, parting, embeddings(convention))
        if found:
            yield found


def precision_hint(
    first: str, reference: Recording, port: Sequence[Stages], precision: str
) -> str | None:
    """Which wider precisions' rounding explains the first stage that parts, in words."""
    names = []
    place = PRECISIONS.index(precision)
    for wider in PRECISIONS[place + 1 :]:
        for stage in stages_at(wider, reference, port):
            if stage.name != first:
                continue
            row = stage.row()
            if not row.parting:
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
    ours = stage.port[picture]
    theirs = stage.reference[picture]
    if stage.name == "grid":
        own_grid = tuple(map(int, ours))
        right_grid = tuple(map(int, theirs))
        return f"the grid is {own_grid}, not {right_grid}"
    # The factor by which the reference's numbers come nearest to the port's.
    products = float((ours * theirs).sum())
    squares = float((theirs * theirs).sum())
    factor = products / (squares or 1.0)
    times = [stage.times(one, factor * stage.reference[one]) for one in parting]
    is_scaled = [one <= 1 for one in times]
    if all(is_scaled):
        return f"every number is {factor:.6g} times the reference's"
    words = "no known mistake gives these numbers"
    for measure, numbers in stage.differences(picture, theirs).items():
        if measure not in ("token", "channel"):
            continue
        is_beyond = numbers > stage.limits[measure]
        beyond = np.flatnonzero(is_beyond)
        count = beyond.size
        if 0 < count < numbers.size:
            words += f"; in picture {picture:03} {count} of {numbers.size} {measure}s differ"
            words += f" (first: {beyond[0]})"
    return words
