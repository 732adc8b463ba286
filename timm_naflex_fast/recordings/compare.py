"""Where does a port part from a reference, and why? Only NumPy is needed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .conventions import resampled
from .format import FROM_REFERENCE, PRECISIONS, Array, Recording, Stages
from .kinds import kind_of, place_of

PIXELS_ARE_ONES = ("grid", "pixels")  # their differences are no shares
GREY_LEVEL = 2 / 255
MUCH_NEARER = 0.3  # than the reference: so near are a mistake's numbers to the port's
HOLDING = ("", "bfloat16", "float16", "float32")
"""Each holds the numbers of the one before it, in the range that matters here; "" is none yet."""
WITH_PADDING = "that have padding"
ROOM = 2.0  # times a stage's limit: a port of a known mistake rounds, and so did who recorded it
Candidates = Iterable[tuple[str, Array]]  # words of a mistake, and what it gives


@dataclass(frozen=True)
class Difference:
    """One stage of one picture.

    Attributes:
        largest: largest difference.
        squares: sum of the squared differences.
        numbers: how many were compared.
        scale: the reference's largest number; 1 for a grid and for pixels.
    """

    largest: float
    squares: float
    numbers: int
    scale: float

    @property
    def share(self) -> float:
        """The largest difference as a share of the largest number."""
        return self.largest / self.scale


@dataclass(frozen=True)
class Row:
    """One stage of all pictures.

    Attributes:
        stage: its name.
        largest: largest difference of all pictures.
        rms: root mean square of the differences.
        scale: the reference's largest number; 1 for a grid and for pixels.
        share: the largest difference as a share of its picture's largest number.
        limit: the share that counts as rounding at the port's precision.
        parting: the pictures that are beyond it.
        compared: how many pictures were compared.
    """

    stage: str
    largest: float
    rms: float
    scale: float
    share: float
    limit: float
    parting: tuple[int, ...]
    compared: int


@dataclass
class Comparison:
    """Adds up the differences of a port over all pictures.

    Attributes:
        order: the names of the stages, in the order in which data flows.
        limits: of each stage the largest share that is rounding, by precision; "own_pixels" where
            the port read the pictures itself.
        total: how many pictures the recording has; 0 where nobody counts.
        own_pixels: by how much the port's pixels differ, where it read the pictures itself.
        in_float32: the port computes in float32, though half a precision would explain its numbers.
    """

    order: Sequence[str]
    limits: Mapping[str, Mapping[str, float]]
    total: int = 0
    own_pixels: float = 0.0
    in_float32: bool = False
    _found: dict[str, dict[int, Difference]] = field(default_factory=dict)
    _held_by: dict[str, str] = field(default_factory=dict)

    def add(self, picture: int, reference: Stages, port: Stages) -> None:
        """Compare the stages of one picture that the port has."""
        for name in port:
            stage = name.removesuffix(FROM_REFERENCE)
            ours, theirs = numbers_of(name, port, reference)
            if ours.shape != theirs.shape:
                continue  # of another grid
            scale = scale_of(stage, reference)
            off = np.abs(ours - theirs)
            one = Difference(float(off.max()), float(np.square(off).sum()), off.size, scale)
            self._found.setdefault(name, {})[picture] = one
            # The precisions in the order in which each holds the numbers of the one before it.
            held = max(_held_by(port[name]), self._held_by.get(name, ""), key=HOLDING.index)
            self._held_by[name] = held
            if name == "pixels":
                self.own_pixels = max(self.own_pixels, one.largest)

    @property
    def pictures(self) -> int:
        """How many pictures were compared."""
        return len({picture for found in self._found.values() for picture in found})

    @property
    def missing(self) -> list[str]:
        """The stages that the port did not write."""
        written = {name.removesuffix(FROM_REFERENCE) for name in self._found}
        return [stage for stage in self.order if stage not in written]

    @property
    def precision(self) -> str:
        """The precision in which the port computes.

        Where it began with the reference's pixels, float32 if that explains the first stage that it
        computed; else the first one that explains every stage, or at least that one. Where none does,
        or where it read the pictures itself, the one that holds its numbers: they differ by more than
        rounding anyway.
        """
        computed = [one for one in self.order if one not in PIXELS_ARE_ONES and one in self._found]
        if self.in_float32 or not computed:
            return PRECISIONS[0]
        first, *_ = computed
        explaining = [one for one in PRECISIONS if self._explains(one, [first])]
        if self.has_own_pixels or not explaining:
            return self._held_by[first]
        if explaining[0] == PRECISIONS[0]:
            return PRECISIONS[0]
        for precision in explaining:
            if self._explains(precision, computed):
                return precision
        return explaining[0]

    def _explains(self, precision: str, stages: Iterable[str]) -> bool:
        """Whether a precision's rounding explains all differences at these stages."""
        for stage in stages:
            limit = self._limit(stage, precision)
            if any(one.share > limit for one in self._found[stage].values()):
                return False
        return True

    def rows(self) -> list[Row]:
        """A row for each stage that the port wrote, in order; the isolated ones follow."""
        names = [*self.order, *(stage + FROM_REFERENCE for stage in self.order)]
        precision = self.precision
        return [self._row(name, precision) for name in names if name in self._found]

    def _row(self, name: str, precision: str) -> Row:
        found = self._found[name]
        limit = self._limit(name, precision)
        numbers = sum(one.numbers for one in found.values())
        return Row(
            stage=name,
            largest=max(one.largest for one in found.values()),
            rms=(sum(one.squares for one in found.values()) / numbers) ** 0.5,
            scale=max(one.scale for one in found.values()),
            share=max(one.share for one in found.values()),
            limit=limit,
            # Not "greater than": NaN parts too.
            parting=tuple(number for number, one in found.items() if not one.share <= limit),
            compared=len(found),
        )

    def _limit(self, name: str, precision: str) -> float:
        """The largest share that is rounding."""
        stage = name.removesuffix(FROM_REFERENCE)
        limits = self.limits[stage]
        limit = limits.get(precision, limits[PRECISIONS[0]])
        if stage == "position_embedding" and "patch_embedding" in self._found:
            return 2 * limit  # that of the patch embedding was taken off on both sides
        if self.own_pixels and name == stage:
            # What a whole grey level moves, for the part of it by which the pixels differ.
            part = min(1.0, self.own_pixels / GREY_LEVEL)
            return max(limit, part * limits.get("own_pixels", 0.0))
        return limit

    @property
    def has_own_pixels(self) -> bool:
        """Whether the port read the pictures itself."""
        return self.own_pixels > 0

    def first(self) -> Row | None:
        """The first stage at which any picture is beyond rounding."""
        for row in self.rows():
            if row.parting:
                return row
        return None


def _held_by(numbers: Array) -> str:
    """The smallest precision that holds all numbers of an array."""
    single = np.asarray(numbers, np.float32)
    if not (single.view(np.uint32) & 0xFFFF).any():  # bfloat16 is the upper half of a float32
        return "bfloat16"
    with np.errstate(over="ignore"):
        half = single.astype(np.float16).astype(np.float32)
    return "float16" if (half == single).all() else "float32"


def scale_of(stage: str, reference: Stages) -> float:
    """Of what a difference is a share: the stage's largest number, 1 for a grid and for pixels."""
    if stage in PIXELS_ARE_ONES:
        return 1.0
    return float(np.abs(reference[stage]).max()) or 1.0


def numbers_of(name: str, port: Stages, reference: Stages) -> tuple[Array, Array]:
    """The numbers of a stage that are compared: the port's and the reference's.

    Of the position embedding both sides take off their own patch embedding, where they have it: so
    what the pixels moved does not count again.
    """
    stage = name.removesuffix(FROM_REFERENCE)
    ours = np.asarray(port[name], np.float64)
    theirs = np.asarray(reference[stage], np.float64)
    before = "patch_embedding"
    if name == "position_embedding" and before in port and before in reference:
        if port[before].shape == ours.shape:
            ours = ours - port[before]
            theirs = theirs - reference[before]
    return ours, theirs


@dataclass(frozen=True)
class Reason:
    """Why a port parts, as far as its numbers tell.

    Attributes:
        stage: where it parts.
        picture: the picture whose numbers were looked at.
        words: what it is.
        known: whether a known mistake gives the port's numbers.
        error: how far the port is from that mistake, as a share of the largest number.
        limit: the largest error that counts as the same.
    """

    stage: str
    picture: int
    words: str
    known: bool
    error: float = 0.0
    limit: float = 0.0


def nearest_mistake(
    row: Row, picture: int, reference: Stages, port: Stages, candidates: Candidates
) -> Reason | None:
    """The known mistake whose numbers are much nearer to a port's than the reference's are.

    It is known to be the reason where the port has its numbers; else something else is wrong too.

    Args:
        row: the stage at which the port parts.
        picture: the number of one that parts there.
        reference: its stages.
        port: the port's.
        candidates: known mistakes and what they give at this stage for this picture.
    """
    ours, theirs = numbers_of(row.stage, port, reference)
    stage = row.stage.removesuffix(FROM_REFERENCE)
    best: tuple[float, str, Array] | None = None
    for words, numbers in candidates:
        mistaken, _ = numbers_of(stage, _as_if(port, reference, stage, numbers), reference)
        if mistaken.shape != ours.shape:
            continue
        distance = _distance(ours, mistaken)
        if best is None or distance < best[0]:
            best = (distance, words, mistaken)
    if best is None:
        return None

    distance, words, mistaken = best
    left = 0.0
    if ours.shape == theirs.shape:
        left = distance / _distance(ours, theirs)
    if left >= MUCH_NEARER:
        return None
    scale = scale_of(stage, reference)
    error = float(np.abs(ours - mistaken).max()) / scale
    # A mistake can make numbers larger, and their rounding with them.
    growth = max(1.0, float(np.abs(mistaken).max()) / scale)
    limit = row.limit * growth
    if stage not in PIXELS_ARE_ONES:  # whose limit is two grey levels already
        limit *= ROOM
    if error <= limit:
        return Reason(row.stage, picture, words, True, error, limit)
    words = (
        f"the nearest known mistake explains {100 * (1 - left):.0f} % of the difference ({words}), "
        "so something else is wrong at this stage too"
    )
    return Reason(row.stage, picture, words, False, error, limit)


def _as_if(port: Stages, reference: Stages, stage: str, numbers: Array) -> Stages:
    """The mistaken stage; with the reference's patch embedding where the port has one."""
    before = "patch_embedding"
    if stage == "position_embedding" and before in port and before in reference:
        return {before: reference[before], stage: numbers}
    return {stage: numbers}


def _distance(ours: Array, theirs: Array) -> float:
    """Root mean square difference."""
    return float(np.sqrt(np.square(ours - theirs).mean()))


def compare_recordings(
    reference: Recording, ports: Sequence[Stages]
) -> tuple[Comparison, list[Reason]]:
    """Compare what a port wrote with a recording.

    Args:
        reference: the recording.
        ports: what the port wrote, for each picture.

    Returns:
        The comparison; and the reason of the first stage that parts, then one for each isolated
        stage that parts. No reasons where nothing parts.
    """
    comparison = Comparison(reference.order, reference.limits, len(reference.stages))
    for number, port in enumerate(ports):
        comparison.add(number, reference.stages[number], port)
    # A mistake can be as small as what half a precision rounds. Nobody has its numbers to float32's
    # rounding by chance.
    strict = replace(comparison, in_float32=True)
    smallest = strict.first()
    if smallest is not None and not comparison.has_own_pixels:
        if _reason(strict, smallest, reference, ports).known:
            comparison = strict
    first = comparison.first()
    reasons = []
    for row in comparison.rows():
        is_isolated = row.stage.endswith(FROM_REFERENCE)
        if row.parting and (is_isolated or row == first):
            reasons.append(_reason(comparison, row, reference, ports))
    return comparison, reasons


def _reason(
    comparison: Comparison, row: Row, reference: Recording, ports: Sequence[Stages]
) -> Reason:
    """Why a port parts at a stage."""
    if row.stage == "grid":
        known = _mistaken_grid(row, reference, ports)
        if known:
            return known
    # All that were recorded come first: to try the conventions of a table takes longer. A mistake is
    # kept at the first stages that show it, and at the end: a port may have written only the latter.
    rows = comparison.rows()
    places = [row]
    if not row.stage.endswith(FROM_REFERENCE):
        places += [one for one in rows[rows.index(row) + 1 :] if one.stage in reference.order]
    nearest = ""
    for place in places:
        for picture in place.parting:
            own, port = reference.stages[picture], ports[picture]
            candidates = recorded_mistakes(reference, row.stage, place.stage, picture, port)
            found = nearest_mistake(place, picture, own, port, candidates)
            if found and found.known:
                return replace(found, stage=row.stage)
            if found and place == row:
                nearest = nearest or found.words
    for picture in row.parting:
        own, port = reference.stages[picture], ports[picture]
        candidates = other_conventions(reference, row.stage, picture)
        found = nearest_mistake(row, picture, own, port, candidates)
        if found and found.known:
            return found
    picture, *_ = row.parting
    where = which_pictures(reference, row)
    return describe(row, picture, reference.stages[picture], ports[picture], where, nearest)


def _mistaken_grid(row: Row, reference: Recording, ports: Sequence[Stages]) -> Reason | None:
    """The known mistake that gives the port's grid; of several the one that gives its pixels."""
    best: tuple[float, Reason] | None = None
    for picture in row.parting:
        port = ports[picture]
        for mistake in reference.about.get("mistakes", ()):
            key = f"{mistake['name']}/{picture:03}"
            grid = reference.mistakes.get(f"{key}.grid")
            if grid is None or (grid != port["grid"]).any():
                continue
            distance = 0.0
            pixels = reference.mistakes.get(f"{key}.pixels")
            if "pixels" in port and pixels is not None and pixels.shape == port["pixels"].shape:
                distance = _distance(port["pixels"], pixels.astype(np.float64))
            if best is None or distance < best[0]:
                best = (distance, Reason("grid", picture, mistake["words"], True))
    return best and best[1]


def describe(
    row: Row, picture: int, reference: Stages, port: Stages, where: str = "", nearest: str = ""
) -> Reason:
    """By what kind of difference a port parts at a stage, where no known mistake explains it.

    ``where``: in words, which pictures part. ``nearest``: in words, the nearest known mistake.
    """
    stage = row.stage.removesuffix(FROM_REFERENCE)
    ours, theirs = numbers_of(row.stage, port, reference)
    scale = scale_of(stage, reference)
    limit = row.limit * scale
    words = kind_of(stage, ours, theirs, reference, limit)
    words = words or nearest or place_of(ours, theirs, limit)
    if where.endswith(WITH_PADDING):
        words = f"{words}; padding plays a part: is it masked?"
    known = "no known mistake gives these numbers"
    if stage.startswith("block_"):
        known = f"{known}; mistakes of a block are known as made in every block"
    return Reason(row.stage, picture, f"{words}{where} ({known})", False)


def recorded_mistakes(
    reference: Recording, first: str, name: str, picture: int, port: Stages
) -> Candidates:
    """The recorded mistakes at a stage of a picture: words and numbers.

    Only those that can be why a port parts at the stage ``first``: none that shows later. And only
    those that show at no earlier stage that the port wrote. There they did not give its numbers, and
    later limits are wider: they would hide a second mistake.
    """
    stage = name.removesuffix(FROM_REFERENCE)
    latest = reference.order.index(first.removesuffix(FROM_REFERENCE))
    earlier = [one for one in reference.order[: reference.order.index(stage)] if one in port]
    for mistake in reference.about.get("mistakes", ()):
        shown = f"{mistake['name']}/{picture:03}"
        if f"{shown}.{stage}" not in reference.mistakes:
            continue
        if reference.order.index(mistake["stage"]) > latest:
            continue
        is_isolated = name != stage
        if is_isolated or not any(f"{shown}.{one}" in reference.mistakes for one in earlier):
            yield mistake["words"], reference.mistakes[f"{shown}.{stage}"]


def other_conventions(reference: Recording, name: str, picture: int) -> Candidates:
    """At the position embedding, what each convention of ``identify`` gives."""
    own = reference.stages[picture]
    is_position = name.removesuffix(FROM_REFERENCE) == "position_embedding"
    if not is_position or reference.table is None or "patch_embedding" not in own:
        return ()
    return resampled(reference.table, own)


def which_pictures(reference: Recording, row: Row) -> str:
    """In words, which of the pictures part, where it is some of them; empty where it is all."""
    pictures = reference.about["pictures"]
    parting = set(row.parting)
    if len(parting) == row.compared:
        return ""
    most = reference.about.get("max_patches", 0)
    kinds: dict[str, Callable[[Mapping[str, Any]], bool]] = {
        WITH_PADDING: lambda one: int(np.prod(one["grid"])) < most,
        "that are wider than high": lambda one: one["grid"][1] > one["grid"][0],
        "that are higher than wide": lambda one: one["grid"][0] > one["grid"][1],
        "that are not square": lambda one: one["grid"][0] != one["grid"][1],
    }
    for words, is_so in kinds.items():
        if parting == {number for number, one in enumerate(pictures) if is_so(one)}:
            return f"; only in pictures {words}"
    return f"; in {len(parting)} of {row.compared} pictures"
