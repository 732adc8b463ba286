"""Why does a port part at a stage? The known mistake whose numbers it has; else what differs.

Tests: ports/tests/test_compare.py.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .conventions import Convention, conventions
from .format import MEASURES, OWN_PIXELS, PRECISIONS, Array, Recording, Stages, sampled
from .guesses import GUESSES, Parting
from .rule import JUMP, Stage, stages_at

# So many limits, and this share of what the reference is off: as near are a reason's numbers to the port's.
# Of 1,700 planted faults in bfloat16 wrong reasons began at 0.31; of 126 right ones 16 are lost.
NEAR = 0.3
NEAR_PIXELS = 1.0  # they are whole grey levels, half a limit each: a right reason may be off by one
ENOUGH = 3  # pictures, where so many part: two have had another mistake's numbers by chance

Numbers = Iterable[tuple[int, Array]]  # what a mistake gives at a stage: of some pictures


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
    pictures: Sequence[int]
    times: float = 0.0


def reason_of(
    stages: Sequence[Stage],
    place: int,
    parting: Sequence[int],
    reference: Recording,
    port: Sequence[Stages],
    precision: str,
) -> Reason:
    """Why a port parts at a stage.

    Args:
        stages: those that the port wrote.
        place: at which of them it parts first.
        parting: the pictures that part there.
        reference: the recording.
        port: what the port made of each picture.
        precision: that of the port.
    """
    first = stages[place]
    known = []
    for mistake in known_mistakes(stages, place, parting, reference):
        reason = reason_if(*mistake, parting)
        if reason:
            known.append(reason)
    guessed = guess(first, parting, reference)
    if is_dump(stages[place:]):
        other = ", ".join(stage.name for stage in stages if stage.row().parting)
        words = (
            f"every later stage is equal: the port is right, but wrote something else as {other}"
        )
        likely = guessed + known
        if likely:
            words += f" ({likely[0].words})"
        return Reason(words, False, parting)
    if known:
        return min(known, key=lambda reason: reason.times)
    if guessed:
        return guessed[0]
    words = smaller_mistake(stages, place, reference, port, precision)
    return Reason(words or describe(first, parting), False, parting)


def is_dump(stages: Sequence[Stage]) -> bool:
    """Whether most numbers of the first stage differ by far, and those of the last one are equal.

    In most tokens: what is wrong in a few may be too little to be seen at the end.
    """
    first = stages[0]
    measure, limit = next(iter(first.limits.items()))
    far = 0.0
    for picture in first.port:
        off = first.differences(picture, first.reference[picture])[measure]
        far = max(far, np.median(off) / limit)
    return far > JUMP and not stages[-1].row().parting


def guess(stage: Stage, parting: Sequence[int], reference: Recording) -> list[Reason]:
    """What may have happened to the numbers of a stage, if they are what a rule gives."""
    numbers = Parting(stage, parting, reference)
    if stage.name == "grid" or numbers.ours.shape != numbers.right.shape:
        return []
    whole = replace(stage, reference=[numbers.right], port={0: numbers.ours})
    found = []
    for rule, least in GUESSES:
        if len(parting) >= least:
            for words, made in rule(numbers):
                reason = reason_if(words, whole, [(0, made)], [0])
                if reason:
                    found.append(Reason(words, False, parting))
    return found


def known_mistakes(
    stages: Sequence[Stage], place: int, parting: Sequence[int], reference: Recording
) -> Iterator[tuple[str, Stage, Numbers]]:
    """Those that may be the reason: in words, at which stage they are looked at, what they give.

    A mistake is recorded at the first stage that shows it, and at the end: there a port is looked at
    that did not write the former. At the position embedding the table may be resized in any way.
    Arguments as ``reason_of`` has them.
    """
    first = stages[place]
    # The mistake is made after the last stage that is equal.
    order = reference.order
    start = order.index(stages[place - 1].name) + 1 if place else 0
    not_written = order[start : order.index(first.name)]
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
    near = NEAR_PIXELS if stage.name == "pixels" else NEAR
    for picture, mistaken in numbers:
        times = stage.worst(picture, mistaken).limits
        if times > near:
            return None
        if picture in parting:
            right = stage.reference[picture]
            if len(mistaken) < len(right):
                right = sampled(right)
            of_right = stage.worst(picture, right).limits
            if times > NEAR * of_right:
                return None
            found[picture] = times
    if len(found) < min(ENOUGH, len(parting)):
        return None
    return Reason(words, True, tuple(found), max(found.values()))


def smaller_mistake(
    stages: Sequence[Stage],
    place: int,
    reference: Recording,
    port: Sequence[Stages],
    precision: str,
) -> str:
    """What else explains numbers that part by little, in words: own pixels, or rounding; or nothing.

    Arguments as ``reason_of`` has them.
    """
    first = stages[place]
    if first.moved:  # what its own pixels move is no precision
        return ""
    is_later = any(stage.name not in MEASURES for stage in stages[:place])
    words = ""
    own_pixels = reference.limits[first.name].get(OWN_PIXELS)
    if own_pixels and not is_later and not any("pixels" in own for own in port):
        if not first.widened(own_pixels, 1.0).row().parting:
            words = (
                "if the port read the pictures itself, write grid and pixels, too: other pixels move "
                f"{first.name} as much. If not: "
            )
    for name in PRECISIONS[PRECISIONS.index(precision) + 1 :]:
        if name in reference.limits[first.name]:
            part = [stage.name for stage in stages_at(name, reference, port) if stage.row().parting]
            if is_later and first.name not in part:
                # Rounding of the whole port would have shown before.
                return (
                    f"as small as {name}'s rounding, and only from this stage on: a small mistake, or "
                    "this stage computes in less"
                )
            if not part:
                return (
                    f"{words}as large as {name}'s rounding: if the port computes in it, or its weights "
                    f"were rounded to it, say --precision {name}"
                )
    return words and f"{words}no known mistake gives these numbers"


def describe(stage: Stage, parting: Sequence[int]) -> str:
    """Which of a port's numbers differ at a stage, in words."""
    picture = parting[0]
    ours = stage.port[picture]
    theirs = stage.reference[picture]
    if stage.name == "grid":
        return f"the grid is {ours.astype(int).tolist()}, not {theirs.astype(int).tolist()}"
    words = "no known mistake gives these numbers"
    for measure, off in stage.differences(picture, theirs).items():
        beyond = np.flatnonzero(off > stage.limits[measure])
        if 0 < beyond.size < off.size:
            words += (
                f"; in picture {picture:03} {beyond.size} of {off.size} {measure}s differ "
                f"(first: {beyond[0]})"
            )
    return words
