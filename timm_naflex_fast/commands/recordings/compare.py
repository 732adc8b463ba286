"""Where does a port part from a reference, and why? Only NumPy is needed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .conventions import resampled
from .format import Array, Port, Recording, Stages

PIXELS_ARE_ONES = ("grid", "pixels")  # their differences are no shares
MUCH_NEARER = 0.3  # than the reference: so near are a mistake's numbers to the port's
ROOM = 2.0  # times a stage's limit: a port of a known mistake rounds, and so did who recorded it
CLOSE = 20  # times the limit: what may be left once a factor is taken off
Candidates = Iterable[tuple[str, Array]]  # words of a mistake, and what it gives


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


@dataclass(frozen=True)
class Comparison:
    """What was found.

    Attributes:
        rows: one for each stage that the port wrote, in the order in which data flows.
        reason: why the first one parts that does; None where none does.
        precision: the port's.
        pictures: how many have a stage that was compared.
        missing: the stages that the port did not write.
    """

    rows: Sequence[Row]
    reason: Reason | None
    precision: str
    pictures: int
    missing: Sequence[str]

    @property
    def first(self) -> Row | None:
        """The first stage at which any picture is beyond rounding."""
        for row in self.rows:
            if row.parting:
                return row
        return None


def compare_recordings(reference: Recording, port: Port) -> Comparison:
    """Compare what a port wrote with a recording."""
    rows: list[Row] = []
    missing = []
    for stage in reference.order:
        limit = limit_of(reference.limits[stage], stage, port, rows)
        row = compare_stage(stage, limit, reference.stages, port.stages)
        if row is None:
            missing.append(stage)
        else:
            rows.append(row)
    pictures = sum(map(bool, port.stages))
    found = Comparison(rows, None, port.precision, pictures, missing)
    if found.first is None:
        return found
    reason = reason_of(found.first, rows, reference, port)
    return Comparison(rows, reason, port.precision, pictures, missing)


def limit_of(limits: Mapping[str, float], stage: str, port: Port, before: Sequence[Row]) -> float:
    """The largest difference that is rounding, as a share of the stage's largest number.

    ``before``: the rows of the stages before.
    """
    limit = limits.get(port.precision, limits["float32"])
    largest = {row.stage: row.largest for row in before}
    if stage == "position_embedding" and "patch_embedding" in largest:
        return 2 * limit  # that of the patch embedding was taken off on both sides
    if largest.get("pixels"):
        # It read the pictures itself, perhaps by another resizer, which rounds other pixels.
        return max(limit, limits.get("own_pixels", 0.0))
    return limit


def compare_stage(
    stage: str, limit: float, references: Sequence[Stages], ports: Sequence[Stages]
) -> Row | None:
    """One stage of the pictures of which a port wrote it; None if there are none."""
    largest = squares = scale = share = 0.0
    numbers = compared = 0
    parting = []
    for picture, (reference, port) in enumerate(zip(references, ports)):
        if stage not in port:
            continue
        ours, theirs = numbers_of(stage, port, reference)
        if ours.shape != theirs.shape:
            continue  # of another grid
        own_scale = scale_of(stage, reference)
        off = np.abs(ours - theirs)
        own_share = float(off.max()) / own_scale
        # Not "greater than": NaN parts too.
        if not own_share <= limit:
            parting.append(picture)
        largest = max(largest, float(off.max()))
        share = max(share, own_share)
        scale = max(scale, own_scale)
        squares += float(np.square(off).sum())
        numbers += off.size
        compared += 1
    if not compared:
        return None
    rms = (squares / numbers) ** 0.5
    return Row(stage, largest, rms, scale, share, limit, tuple(parting), compared)


def scale_of(stage: str, reference: Stages) -> float:
    """Of what a difference is a share: the stage's largest number, 1 for a grid and for pixels."""
    if stage in PIXELS_ARE_ONES:
        return 1.0
    return float(np.abs(reference[stage]).max()) or 1.0


def numbers_of(stage: str, port: Stages, reference: Stages) -> tuple[Array, Array]:
    """The numbers of a stage that are compared: the port's and the reference's.

    Of the position embedding both sides take off their own patch embedding, where they have it: so
    what the pixels moved does not count again.
    """
    ours = np.asarray(port[stage], np.float64)
    theirs = np.asarray(reference[stage], np.float64)
    before = "patch_embedding"
    if stage == "position_embedding" and before in port and port[before].shape == ours.shape:
        ours = ours - port[before]
        theirs = theirs - reference[before]
    return ours, theirs


def reason_of(first: Row, rows: Sequence[Row], reference: Recording, port: Port) -> Reason:
    """Why a port parts at its first stage that does.

    A mistake is kept at the first stages that show it and at the end, so a port that did not write
    the former is looked at there.
    """
    nearest = None
    for row in (first, rows[-1]):
        for picture in row.parting:
            found = nearest_mistake(
                row,
                picture,
                reference,
                port,
                recorded_mistakes(reference, first.stage, row.stage, picture, port),
            )
            if found and found.known:
                return Reason(first.stage, picture, found.words, True, found.error, found.limit)
            if row == first:
                nearest = nearest or found
    if first.stage == "position_embedding" and reference.table is not None:
        # Those that were recorded come first: to try all conventions takes longer.
        for picture in first.parting:
            tried = resampled(reference.table, reference.stages[picture])
            found = nearest_mistake(first, picture, reference, port, tried)
            if found and found.known:
                return found
    if nearest:
        return nearest
    picture = first.parting[0]
    words = describe(first, port.stages[picture], reference.stages[picture])
    return Reason(first.stage, picture, f"{words} (no known mistake gives these numbers)", False)


def recorded_mistakes(
    reference: Recording, first: str, stage: str, picture: int, port: Port
) -> list[tuple[str, Array]]:
    """What known mistakes give at a stage of a picture, with their words.

    Only those that do not show later than at the stage ``first``, and show at no earlier stage that
    the port wrote: there they did not give its numbers, and later limits are wider.
    """
    order = reference.order
    found = []
    for mistake in reference.about.get("mistakes", ()):
        numbers = reference.mistakes.get(f"{mistake['name']}/{picture:03}.{stage}")
        shows = mistake["stage"]
        is_later = order.index(shows) > order.index(first)
        is_earlier = shows in port.stages[picture] and order.index(shows) < order.index(stage)
        if numbers is not None and not is_later and not is_earlier:
            found.append((mistake, numbers))
    if stage == "grid":
        return _with_pixels(found, reference, picture, port.stages[picture])
    return [(mistake["words"], numbers) for mistake, numbers in found]


def _with_pixels(
    found: Sequence[tuple[Mapping[str, str], Array]],
    reference: Recording,
    picture: int,
    port: Stages,
) -> list[tuple[str, Array]]:
    """Mistakes of the grid, those first whose pixels are nearest to the port's."""
    distances = []
    for mistake, grid in found:
        pixels = reference.mistakes.get(f"{mistake['name']}/{picture:03}.pixels")
        distance = 0.0
        if pixels is not None and "pixels" in port and pixels.shape == port["pixels"].shape:
            distance = _distance(port["pixels"], np.asarray(pixels, np.float64))
        distances.append((distance, mistake["words"], grid))
    distances.sort(key=lambda one: one[0])
    return [(words, grid) for _, words, grid in distances]


def nearest_mistake(
    row: Row, picture: int, reference: Recording, port: Port, candidates: Candidates
) -> Reason | None:
    """The known mistake whose numbers are much nearer to a port's than the reference's are.

    It is known to be the reason where the port has its numbers; else something else is wrong too.
    """
    stage = row.stage
    own = reference.stages[picture]
    ours, theirs = numbers_of(stage, port.stages[picture], own)
    best: tuple[float, str, Array] | None = None
    for words, numbers in candidates:
        # Beside the reference's patch embedding, where the port has one.
        mistaken = np.asarray(numbers, np.float64)
        if stage == "position_embedding" and "patch_embedding" in port.stages[picture]:
            mistaken = mistaken - own["patch_embedding"]
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
    scale = scale_of(stage, own)
    error = float(np.abs(ours - mistaken).max()) / scale
    # A mistake can make numbers larger, and their rounding with them.
    limit = row.limit * max(1.0, float(np.abs(mistaken).max()) / scale)
    if stage not in PIXELS_ARE_ONES:  # whose limit is two grey levels already
        limit *= ROOM
    if error <= limit:
        return Reason(stage, picture, words, True, error, limit)
    words = (
        f"the nearest known mistake explains {100 * (1 - left):.0f} % of the difference ({words}), "
        "so something else is wrong at this stage too"
    )
    return Reason(stage, picture, words, False, error, limit)


def _distance(ours: Array, theirs: Array) -> float:
    """Root mean square difference."""
    return float(np.sqrt(np.square(ours - theirs).mean()))


def describe(row: Row, port: Stages, reference: Stages) -> str:
    """Which of a port's numbers differ at a stage, in words."""
    ours, theirs = numbers_of(row.stage, port, reference)
    if row.stage == "grid":
        return f"the grid is {tuple(map(int, ours))}, not {tuple(map(int, theirs))}"
    limit = row.limit * scale_of(row.stage, reference)
    factor = float((ours * theirs).sum()) / float((theirs * theirs).sum() or 1.0)
    if np.abs(ours - factor * theirs).max() <= CLOSE * limit:
        return f"every number is {factor:.6g} times the reference's"
    beyond = np.abs(ours - theirs) > limit
    words = f"{beyond.sum():,} of {beyond.size:,} numbers differ by more than rounding"
    if beyond.ndim == 2:
        for what, differ in (("tokens", beyond.any(1)), ("channels", beyond.any(0))):
            if not differ.all():
                words += f", in {differ.sum()} of {len(differ)} {what} (first: {differ.argmax()})"
    return words
