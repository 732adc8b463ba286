"""Why does a port part at a stage? The known mistake whose numbers it has; else what differs.

Tests: ports/tests/test_compare.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .conventions import Convention, conventions
from .format import PRECISIONS, Array, Recording, sampled
from .rule import Stage

MUCH_NEARER = 0.3  # than the reference: so near are a mistake's numbers to the port's
# So many limits: as near, too. Of 1,700 planted faults in bfloat16 wrong reasons began at 0.31; of 126
# right ones 16 are lost. Pixels are whole grey levels, half a limit each: there a right reason may be
# off by one.
FITS = 0.3
EVIDENCE = 0.1  # limits by which a mistake known of one picture has to be nearer than one of all

Numbers = Iterator[tuple[int, Array]]  # what a mistake gives at a stage: of some pictures


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
    not_written: Sequence[str],
    precision: str,
) -> Reason:
    """Why a port parts at a stage.

    Args:
        stages: those that the port wrote, from the one on where it parts first.
        parting: the pictures that part there.
        reference: the recording.
        not_written: stages that the port did not write.
        precision: that of the port.
    """
    known = []
    for mistake in known_mistakes(stages, parting, reference, not_written):
        reason = reason_if(*mistake, parting)
        if reason:
            known.append(reason)

    def distance(reason: Reason) -> float:
        is_of_some = len(reason.pictures) < len(parting)
        return round(reason.times, 3) + EVIDENCE * is_of_some

    if known:
        return min(known, key=distance)
    first = stages[0]
    words = precision_hint(first, reference, precision)
    if not words or first.moved:  # what its own pixels move is no precision
        words = describe(first, parting)
    return Reason(words, False, tuple(parting))


def known_mistakes(
    stages: Sequence[Stage],
    parting: Sequence[int],
    reference: Recording,
    not_written: Sequence[str],
) -> Iterator[tuple[str, Stage, Numbers]]:
    """Those that may be the reason: in words, at which stage they are looked at, what they give.

    A mistake is recorded at the first stage that shows it, and at the end: there a port is looked at
    that did not write the former. At the position embedding the table may be resized in any way.
    """
    first = stages[0]
    looked_at = {**dict.fromkeys(not_written, stages[-1]), first.name: first}
    pixels = {one.name: one for one in stages}.get("pixels")
    tried = range(reference.about["mistakes_tried"])
    parting_tried = set(parting).intersection(tried)
    for mistake in reference.about["mistakes"]:
        stage = looked_at.get(mistake["stage"])
        # It cannot be this one where a picture parts in which it does not show.
        if stage is None or parting_tried.difference(mistake["pictures"]):
            continue
        name = mistake["name"]
        if stage.name == "grid":
            # It is two numbers, which many mistakes give: the pixels have to be this one's, too.
            if pixels is None:
                continue
            numbers = recorded(name, pixels, reference)
            if any(pixels.worst(*one).limits > 1 for one in numbers):
                continue
        yield mistake["words"], stage, recorded(name, stage, reference)

    if first.name == "position_embedding":
        grids = {}
        for picture in first.port:
            h, w = reference.about["pictures"][picture]["grid"]
            grids[picture] = (1, h, w)
        for convention in conventions(list(grids.values())):
            words = f"the table is resampled otherwise: {convention.words()}"
            yield words, first, resized(convention, grids, reference)


def recorded(name: str, stage: Stage, reference: Recording) -> Numbers:
    """What a mistake of this name gives at a stage, in the port's pictures of which it is recorded."""
    for picture in stage.port:
        key = f"{name}/{picture:03}.{stage.name}"
        if key in reference.mistakes:
            yield picture, reference.mistakes[key]


def resized(
    convention: Convention, grids: Mapping[int, tuple[int, int, int]], reference: Recording
) -> Numbers:
    """The position embeddings of pictures of these grids, if the table is resized by a convention."""
    for picture, grid in grids.items():
        added = convention.tokens(reference.table, [grid])
        yield picture, reference.stages[picture]["patch_embedding"] + added


def reason_if(words: str, stage: Stage, numbers: Numbers, parting: Sequence[int]) -> Reason | None:
    """The reason ``words``, if the port has these numbers in each of their pictures.

    And if they are much nearer to the port's than the reference's are, where the port parts.
    """
    found = {}
    fits = 1.0 if stage.name == "pixels" else FITS
    for picture, mistaken in numbers:
        times = stage.worst(picture, mistaken).limits
        if times > fits:
            return None
        if picture in parting:
            right = stage.reference[picture]
            if len(mistaken) < len(right):
                right = sampled(right)
            of_right = stage.worst(picture, right).limits
            if times > MUCH_NEARER * of_right:
                return None
            found[picture] = times
    if not found:
        return None
    return Reason(words, True, tuple(found), max(found.values()))


def precision_hint(stage: Stage, reference: Recording, precision: str) -> str:
    """Which wider precisions' rounding explains a stage that parts, in words; or nothing."""
    names = []
    by_precision = reference.limits[stage.name]
    place = PRECISIONS.index(precision)
    for wider in PRECISIONS[place + 1 :]:
        limits = dict(stage.limits)
        # ``drift --against`` is in float32 and has no others.
        for measure, limit in by_precision.get(wider, {}).items():
            limits[measure] += limit - by_precision[precision][measure]
        if not replace(stage, limits=limits).row().parting:
            names.append(wider)
    if not names:
        return ""
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
        return f"the grid is {ours.astype(int).tolist()}, not {theirs.astype(int).tolist()}"
    # The factor by which the reference's numbers come nearest to the port's.
    factor = np.vdot(ours, theirs) / np.vdot(theirs, theirs)
    if all(stage.worst(one, factor * stage.reference[one]).limits <= FITS for one in parting):
        return f"every number is {factor:.6g} times the reference's"
    words = "no known mistake gives these numbers"
    for measure, off in stage.differences(picture, theirs).items():
        beyond = np.flatnonzero(off > stage.limits[measure])
        if 0 < beyond.size < off.size:
            words += (
                f"; in picture {picture:03} {beyond.size} of {off.size} {measure}s differ "
                f"(first: {beyond[0]})"
            )
    return words
