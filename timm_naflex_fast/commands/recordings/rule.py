"""The rule: how far a port's numbers are from a recording's at each stage. Only NumPy is needed.

Tests: tests/commands/recordings/test_compare.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

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
        std: that of each colour, by which pixels were divided.
        limits: what counts as rounding, by measure.
    """

    name: str
    reference: Sequence[Array]
    port: Mapping[int, Array]
    std: Sequence[float]
    limits: Mapping[str, float]

    @cached_property
    def sizes(self) -> Array:
        """How large its channels (C,) are: the root mean square over all tokens of the reference.

        Of all pictures: one of few tokens may have a channel near zero. Of pixels, one grey level.
        """
        if self.name == "pixels":
            grey_level = 1 / (255 * np.array(self.std))  # (colours,)
            width = self.reference[0].shape[1]
            repeats = width // len(self.std)
            return np.tile(grey_level, repeats)
        rows = [np.atleast_2d(one) for one in self.reference]
        tokens = np.concatenate(rows)
        return root_mean_square(tokens)

    def differences(self, picture: int, theirs: Array) -> dict[str, Array]:
        """How far the port is from these numbers of a picture, by each measure of the stage.

        - Grid: each difference.
        - Pixels: each difference, and that of the picture's mean, in grey levels.
        - The pooled output: each difference, as a share of the largest number.
        - Tokens (N, C): of each token the median difference, as a share of its median number; of
          each channel the root mean square difference, as a share of its root mean square. So an
          outlier of one cell or channel hides nothing.

        The numbers may be a sample of the picture's tokens.
        """
        ours = self.port[picture]
        if ours.shape != theirs.shape:
            ours = sampled(ours)
        if ours.shape != theirs.shape:
            infinite = np.array(np.inf)
            return dict.fromkeys(self.limits, infinite)
        off = np.abs(ours - theirs)
        if self.name == "grid":
            return {"number": off}
        if self.name == "pixels":
            return self._pixel_differences(ours, theirs)
        # What is divided by must not be zero.
        tiny = np.finfo(np.float64).tiny
        smallest = SMALLEST_SCALE * np.median(self.sizes) + tiny
        magnitudes = np.abs(theirs)
        if self.name == "pooled":
            largest = max(magnitudes.max(), smallest)
            return {"number": off / largest}
        # Of each token (N,).
        token_sizes = np.median(magnitudes, 1)
        token_sizes = np.maximum(token_sizes, smallest)
        token_off = np.median(off, 1)
        # Of each channel (C,).
        channel_sizes = np.maximum(self.sizes, root_mean_square(theirs))
        channel_sizes = np.maximum(channel_sizes, smallest)
        channel_off = root_mean_square(off)
        return {
            "token": token_off / token_sizes,
            "channel": channel_off / channel_sizes,
        }

    def _pixel_differences(self, ours: Array, theirs: Array) -> dict[str, Array]:
        """How far pixels are from these, and their mean from the mean of these, in grey levels."""
        levels = (ours - theirs) / self.sizes
        # A mistake may spread pixels wider, and so what their rounding moves.
        extent = float(np.ptp(theirs / self.sizes))
        spread = max(extent / 255, 1.0)
        pixel = np.abs(levels)
        mean = np.abs(levels.mean())
        return {
            "pixel": pixel / spread,
            "mean": mean / spread,
        }

    def shares(self, picture: int, numbers: Array) -> dict[str, float]:
        """The largest of the differences from these numbers of a picture, by measure."""
        largest = {}
        for measure, off in self.differences(picture, numbers).items():
            largest[measure] = float(off.max())
        return largest

    def times(self, picture: int, numbers: Array) -> float:
        """How far the port is from these numbers of a picture, in limits: beyond 1 they differ."""
        found = self.shares(picture, numbers)
        times = []
        for measure, limit in self.limits.items():
            times.append(found[measure] / limit)
        # NumPy's maximum: Python's passes over NaN.
        return float(np.max(times))

    def row(self) -> Row:
        """How far the port is from the reference."""
        shares = {}
        for picture in self.port:
            right = self.reference[picture]
            shares[picture] = self.shares(picture, right)
        parting = []
        for picture, found in shares.items():
            within = [found[measure] <= limit for measure, limit in self.limits.items()]
            # Not "greater than": NaN differs too.
            if not all(within):
                parting.append(picture)
        # The worst picture's share of each measure, and how near that is to its limit; NaN is worst.
        largest = {}
        nearness = []
        for measure, limit in self.limits.items():
            found_in_pictures = [found[measure] for found in shares.values()]
            largest[measure] = float(np.max(found_in_pictures))
            nearness.append(largest[measure] / limit)
        nearest = int(np.argmax(nearness))
        measure = list(self.limits)[nearest]
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
        written = written_of(name, port)
        if not written:
            continue
        by_precision = reference.limits[name]
        limits = dict(by_precision[precision])
        before = ""
        if found:
            before = found[-1].name
        if name == "position_embedding" and before == "patch_embedding":
            # What the patches differ, whose pixels may be the port's own, does not count again.
            written = without_patches(written, found[-1])
        else:
            # Who reads the pictures itself has other pixels, and later numbers follow them.
            of_own_pixels = by_precision.get(OWN_PIXELS, {})
            for measure, limit in of_own_pixels.items():
                limits[measure] += moved * limit
        stage = Stage(name, right, written, reference.about["std"], limits)
        found.append(stage)
        if name == "pixels":
            moved = pixels_moved(stage)
    return found


def written_of(stage: str, port: Sequence[Stages]) -> dict[int, Array]:
    """The port's numbers of a stage, in the pictures of which it wrote it."""
    found = {}
    for picture, own in enumerate(port):
        if stage in own:
            found[picture] = own[stage]
    return found


def pixels_moved(pixels: Stage) -> float:
    """How many grey levels the port's own pixels differ in the worst picture, up to one."""
    levels = []
    for picture in pixels.port:
        right = pixels.reference[picture]
        shares = pixels.shares(picture, right)
        levels.append(shares["pixel"])
    return min(max(levels), 1.0)


def without_patches(tokens: dict[int, Array], patches: Stage) -> dict[int, Array]:
    """The port's position embeddings, as if its patch embeddings were the reference's."""
    found = dict(tokens)
    for picture, ours in patches.port.items():
        theirs = patches.reference[picture]
        if picture not in tokens:
            continue
        if ours.shape == theirs.shape:
            off = ours - theirs
            found[picture] = tokens[picture] - off
    return found


def root_mean_square(tokens: Array) -> Array:
    """Of each channel of (N, C)."""
    numbers = np.asarray(tokens, np.float64)
    squares: Array = np.square(numbers)
    mean_square = squares.mean(0)  # (C,)
    return np.sqrt(mean_square)
