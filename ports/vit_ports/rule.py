"""The rule: how far a port's numbers are from a recording's at each stage. Only NumPy is needed.

Tests: ports/tests/test_compare.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .format import OWN_PIXELS, Array, Recording, Stages, sampled

# Of the stage's median: that of a token or channel near zero. Kernels that sum to zero leave of a flat patch what
# float32 rounds: in three orders of sums up to 7e-7 of the median, which has to stay within a limit of 2e-5.
SMALLEST_SCALE = 0.05
# A fault may grow, and go beyond a limit after the stage where it is made: from there we go back while the stage
# before is beyond two thirds of its limit, nearer than this one, and no more than so many times. Measured on 113
# faults: with 8-bit weights by block or tensor, said to be bfloat16, 4 of 226 verdicts name a wrong stage (14 where
# it need not grow from stage to stage); with --precision int8 none of 452 (3 without NEARLY); else none of 791.
NEARLY = 2 / 3
JUMP = 3.0
# Grey levels by which rounding to a precision moves a pixel between -1 and 1: such pixels are the recorded ones.
ROUNDED = {"float32": 2e-4, "float16": 0.032, "tf32": 0.063, "bfloat16": 0.25, "int8": 0.25}


class Worst(NamedTuple):
    """How far a port is from numbers, in the measure in which it is farthest."""

    limits: float  # the share, in limits: beyond 1 they differ
    share: float
    measure: str


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
        moved: how many grey levels the port's own pixels differ, if its limit is wider for that.
    """

    stage: str
    measure: str
    share: float
    limit: float
    parting: tuple[int, ...]
    compared: int
    moved: float


@dataclass(frozen=True)
class Stage:
    """One stage of a reference and of a port, and what counts as rounding there.

    Attributes:
        name: of the stage.
        reference: its numbers in each picture.
        port: the port's, in the pictures that can be compared.
        std: that of each colour, by which pixels were divided.
        limits: what counts as rounding, by measure.
        moved: as in ``Row``.
    """

    name: str
    reference: Sequence[Array]
    port: Mapping[int, Array]
    std: Sequence[float]
    limits: Mapping[str, float]
    moved: float = 0.0

    @cached_property
    def sizes(self) -> Array:
        """How large its channels (C,) are: the root mean square over all tokens of the reference.

        Of all pictures: one of few tokens may have a channel near zero.
        """
        rows = [np.atleast_2d(one) for one in self.reference]
        return root_mean_square(np.concatenate(rows))

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
            return dict.fromkeys(self.limits, np.array(np.inf))
        off = np.abs(ours - theirs)
        if self.name == "grid":
            return {"number": off}
        if self.name == "pixels":
            # A mistake may spread pixels wider, and so what their rounding moves.
            # (p * p * 3,) grey levels of 255 by what a colour is divided by
            levels = 255 * np.resize(self.std, theirs.shape[1])
            spread = max(np.ptp(theirs * levels) / 255, 1.0)
            moved = (ours - theirs) * levels / spread
            return {
                "pixel": np.abs(moved),
                "mean": np.abs(moved.mean()),
            }
        magnitudes = np.abs(theirs)
        # What is divided by must not be zero.
        smallest = SMALLEST_SCALE * np.median(self.sizes) + 1e-300
        if self.name == "pooled":
            return {"number": off / max(magnitudes.max(), smallest)}
        token_sizes = np.median(magnitudes, 1)  # (N,)
        channel_sizes = np.maximum(self.sizes, root_mean_square(theirs))  # (C,)
        return {
            "token": np.median(off, 1) / np.maximum(token_sizes, smallest),
            "channel": root_mean_square(off) / np.maximum(channel_sizes, smallest),
        }

    def worst(self, picture: int, numbers: Array) -> Worst:
        """The largest of the differences from these numbers of a picture, in limits."""
        found = []
        for measure, off in self.differences(picture, numbers).items():
            share = math.inf if np.isnan(off).any() else float(off.max())
            found.append(Worst(share / self.limits[measure], share, measure))
        return max(found)

    @cached_property
    def worsts(self) -> dict[int, Worst]:
        """How far the port is from the reference, in each of its pictures."""
        return {picture: self.worst(picture, self.reference[picture]) for picture in self.port}

    @property
    def farthest(self) -> float:
        """How far the port is from the reference in the worst picture, in limits."""
        return max(self.worsts.values()).limits

    def widened(self, more: Mapping[str, float], times: float) -> "Stage":
        """The stage with limits to which some more is added, so many times."""
        limits = {measure: limit + times * more[measure] for measure, limit in self.limits.items()}
        return replace(self, limits=limits, moved=times)

    def row(self, part: float = 1.0) -> Row:
        """How far the port is from the reference; pictures part beyond this part of a limit."""
        worst = max(self.worsts.values())
        return Row(
            stage=self.name,
            measure=worst.measure,
            share=worst.share,
            limit=self.limits[worst.measure],
            parting=tuple(one for one in self.port if self.worsts[one].limits > part),
            compared=len(self.port),
            moved=self.moved,
        )


def stages_at(precision: str, reference: Recording, port: Sequence[Stages]) -> list[Stage]:
    """The stages that the port wrote, in the order in which data flows, with a precision's limits."""
    found: list[Stage] = []
    moved = 0.0  # how many grey levels the port's own pixels differ in the worst picture, up to one
    for name in reference.order:
        written = {picture: own[name] for picture, own in enumerate(port) if name in own}
        if not written:
            continue
        right = [own[name] for own in reference.stages]
        by_precision = reference.limits[name]
        stage = Stage(name, right, written, reference.about["std"], by_precision[precision])
        if name == "position_embedding" and found and found[-1].name == "patch_embedding":
            if stage.row().parting:
                # What the patches differ, whose pixels may be the port's own, does not count again.
                stage = replace(stage, port=without_patches(written, found[-1]))
        elif moved and OWN_PIXELS in by_precision:
            # Who reads the pictures itself has other pixels, and later numbers follow them.
            stage = stage.widened(by_precision[OWN_PIXELS], moved)
        found.append(stage)
        if name == "pixels":
            moved = max(stage.differences(one, right[one])["pixel"].max() for one in written)
            moved = 0.0 if moved <= ROUNDED[precision] else min(1.0, moved)
    return found


def without_patches(tokens: dict[int, Array], patches: Stage) -> dict[int, Array]:
    """The port's position embeddings, as if its patch embeddings were the reference's."""
    found = dict(tokens)
    for picture, ours in patches.port.items():
        theirs = patches.reference[picture]
        if picture in tokens and ours.shape == theirs.shape:
            off = ours - theirs
            found[picture] = tokens[picture] - off
    return found


def root_mean_square(tokens: Array) -> Array:
    """Of each channel of (N, C)."""
    squares: Array = np.square(tokens, dtype=np.float64)
    mean_square = squares.mean(0)  # (C,)
    return np.sqrt(mean_square)
