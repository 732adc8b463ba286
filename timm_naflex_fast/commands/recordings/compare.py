"""Where does a port part from a recording, and why? Only NumPy is needed.

Tests: tests/commands/recordings/test_compare.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from .format import (
    OWN_PIXELS,
    PRECISIONS,
    Array,
    Recording,
    Stages,
    read_port,
    read_recording,
    sampled,
)

NEARLY = 2 / 3  # of its limit: a stage beyond it parts if the next one does
SMALLEST_SCALE = 1e-3  # of the stage's median: that of a token or channel near zero


@dataclass(frozen=True)
class Row:
    """One stage of all pictures.

    Attributes:
        stage: its name.
        measure: how it is measured: of the stage's measures the one nearest to its limit.
        share: what the worst picture has in this measure.
        limit: what counts as rounding in it.
        parting: the pictures that are beyond a limit.
        compared: how many pictures were compared.
    """

    stage: str
    measure: str
    share: float
    limit: float
    parting: tuple[int, ...]
    compared: int


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


@dataclass(frozen=True)
class Comparison:
    """What was found.

    Attributes:
        rows: one for each stage that the port wrote, in the order in which data flows.
        reason: why the first one parts that does; None where none does.
        precision: the port's, as it was said.
        missing: the pictures that lack a stage which the port wrote of another one.
        not_written: the stages that the port wrote of no picture.
    """

    rows: Sequence[Row]
    reason: Reason | None
    precision: str
    missing: Sequence[int]
    not_written: Sequence[str]

    @property
    def first(self) -> Row | None:
        """The first stage at which any picture is beyond rounding."""
        for row in self.rows:
            if row.parting:
                return row
        return None


@dataclass(frozen=True)
class Stage:
    """One stage of a reference and of a port, and what counts as rounding there.

    Attributes:
        name: of the stage.
        reference: its numbers in each picture.
        port: the port's, in the pictures that can be compared.
        sizes: of its channels, see :func:`channel_sizes`.
        limits: what counts as rounding, by measure.
    """

    name: str
    reference: Sequence[Array]
    port: Mapping[int, Array]
    sizes: Array
    limits: Mapping[str, float]

    def shares(self, picture: int, numbers: Array) -> dict[str, float]:
        """How far the port is from these numbers of a picture, by measure; see :func:`shares`.

        They may be a sample of its tokens.
        """
        ours = self.port[picture]
        if ours.shape != numbers.shape:
            ours = sampled(ours)
        if ours.shape != numbers.shape:
            return dict.fromkeys(self.limits, np.inf)
        return shares(self.name, ours, numbers, self.sizes)

    def times(self, picture: int, numbers: Array) -> float:
        """How far the port is from these numbers of a picture, in limits: beyond 1 they differ."""
        found = self.shares(picture, numbers)
        return max(found[measure] / limit for measure, limit in self.limits.items())

    def row(self) -> Row:
        """How far the port is from the reference."""
        largest = dict.fromkeys(self.limits, 0.0)
        parting = []
        for picture in self.port:
            found = self.shares(picture, self.reference[picture])
            largest = {measure: max(largest[measure], found[measure]) for measure in largest}
            if any(found[measure] > limit for measure, limit in self.limits.items()):
                parting.append(picture)
        measure = max(largest, key=lambda one: largest[one] / self.limits[one])
        return Row(
            self.name,
            measure,
            largest[measure],
            self.limits[measure],
            tuple(parting),
            len(self.port),
        )


def compare_folders(
    reference: str | Path, port: str | Path, precision: str = "float32"
) -> Comparison:
    """Compare what a port wrote with a recording.

    Args:
        reference: folder of the recording.
        port: folder of the port's stages.safetensors or .npy files.
        precision: in which the port computes, or to which its weights were rounded: "float32",
            "tf32", "float16" or "bfloat16".

    Returns:
        The rows, and the reason.

    Raises:
        ValueError: a folder that cannot be compared, or another precision.
        OSError: a file cannot be read.

    >>> found = compare_folders(KIT, KIT)
    >>> found.first, found.reason
    (None, None)
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}; got {precision!r}")
    recording = read_recording(Path(reference))
    return compare_recordings(recording, read_port(Path(port), recording), precision)


def compare_recordings(
    reference: Recording, port: Sequence[Stages], precision: str = "float32"
) -> Comparison:
    """Compare the stages that a port made of each picture with a recording."""
    from .reasons import reason_of

    stages = stages_at(precision, reference, port)
    rows = [stage.row() for stage in stages]
    written = {name for own in port for name in own}
    not_written = [name for name in reference.order if name not in written]
    missing = [picture for picture, own in enumerate(port) if written - set(own)]
    found = Comparison(rows, None, precision, missing, not_written)
    if found.first is None:
        return found
    place = rows.index(found.first)
    # A fault may grow from stage to stage, and go beyond a limit after the stage where it is made.
    while place and rows[place - 1].share > NEARLY * rows[place - 1].limit:
        place -= 1
        limits = {measure: NEARLY * limit for measure, limit in stages[place].limits.items()}
        stages[place] = replace(stages[place], limits=limits)
        rows[place] = stages[place].row()
    reason = reason_of(stages[place:], rows[place].parting, reference, port, precision)
    return replace(found, reason=reason)


def stages_at(precision: str, reference: Recording, port: Sequence[Stages]) -> list[Stage]:
    """The stages that the port wrote, in the order in which data flows, with a precision's limits."""
    found: list[Stage] = []
    moved = 0.0  # how many grey levels the port's own pixels differ, up to one
    for name in reference.order:
        right = [own[name] for own in reference.stages]
        written = {picture: own[name] for picture, own in enumerate(port) if name in own}
        if not written:
            continue
        limits = dict(reference.limits[name][precision])
        if name == "position_embedding" and found and found[-1].name == "patch_embedding":
            # What the patches differ, whose pixels may be the port's own, does not count again.
            written = without_patches(written, found[-1])
        else:
            # Who reads the pictures itself has other pixels, and later numbers follow them.
            for measure, limit in reference.limits[name].get(OWN_PIXELS, {}).items():
                limits[measure] += moved * limit
        sizes = channel_sizes(name, right, reference.about["std"])
        stage = Stage(name, right, written, sizes, limits)
        found.append(stage)
        if name == "pixels":
            levels = [stage.shares(picture, right[picture])["pixel"] for picture in written]
            moved = min(max(levels), 1.0)
    return found


def without_patches(tokens: dict[int, Array], patches: Stage) -> dict[int, Array]:
    """The port's position embeddings, as if its patch embeddings were the reference's."""
    found = dict(tokens)
    for picture, ours in patches.port.items():
        theirs = patches.reference[picture]
        if picture in tokens and ours.shape == theirs.shape:
            found[picture] = tokens[picture] - (ours - theirs)
    return found


def shares(stage: str, ours: Array, theirs: Array, sizes: Array) -> dict[str, float]:
    """The largest of :func:`differences`, by measure."""
    found = differences(stage, ours, theirs, sizes)
    return {measure: float(numbers.max()) for measure, numbers in found.items()}


def differences(stage: str, ours: Array, theirs: Array, sizes: Array) -> dict[str, Array]:
    """How far numbers of a stage are from others of the same shape, by each measure of the stage.

    - Grid: each difference.
    - Pixels: each difference, and that of the picture's mean, in grey levels.
    - The pooled output: each difference, as a share of the largest number.
    - Tokens (N, C): of each token the median difference, as a share of its median number; of each
      channel the root mean square difference, as a share of its root mean square. So an outlier of
      one cell or channel hides nothing.

    ``sizes``: of the channels, see :func:`channel_sizes`.
    """
    off = np.abs(ours - theirs)
    if stage == "grid":
        return {"number": off}
    if stage == "pixels":
        # A mistake may spread pixels wider, and so what their rounding moves.
        spread = max(float(np.ptp(theirs / sizes)) / 255, 1.0)
        mean = ((ours - theirs) / sizes).mean()
        return {"pixel": off / sizes / spread, "mean": np.abs(mean) / spread}
    smallest = SMALLEST_SCALE * np.median(sizes) + np.finfo(np.float64).tiny
    if stage == "pooled":
        return {"number": off / max(np.abs(theirs).max(), smallest)}
    token_sizes = np.median(np.abs(theirs), 1)  # (N,)
    sizes = np.maximum(sizes, root_mean_square(theirs))  # (C,)
    return {
        "token": np.median(off, 1) / np.maximum(token_sizes, smallest),
        "channel": root_mean_square(off) / np.maximum(sizes, smallest),
    }


def channel_sizes(stage: str, pictures: Sequence[Array], std: Sequence[float]) -> Array:
    """How large the channels (C,) of a stage are: the root mean square over all tokens.

    Of all pictures: one of few tokens may have a channel near zero. Of pixels, one grey level.

    Args:
        stage: its name.
        pictures: its numbers in each picture.
        std: that of each colour, by which pixels were divided.
    """
    if stage == "pixels":
        width = pictures[0].shape[1]
        return np.tile(1 / (255 * np.array(std)), width // len(std))
    return root_mean_square(np.concatenate([np.atleast_2d(numbers) for numbers in pictures]))


def root_mean_square(tokens: Array) -> Array:
    """Of each channel of (N, C)."""
    squares: Array = np.square(np.asarray(tokens, np.float64)).mean(0)
    return np.sqrt(squares)
