"""The rule: how far a port's numbers are from a recording's at each stage. Only NumPy is needed.

Tests: tests/commands/recordings/test_compare.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .format import OWN_PIXELS, Array, Recording, Stages, sampled

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
