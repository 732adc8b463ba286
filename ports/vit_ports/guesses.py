"""What may have happened to numbers, whatever the tower: one plain rule for each.

A rule makes of the reference's numbers what the port would have then, and says it in words. It is
believed only where the port does have these numbers (see ``reasons``).

Tests: ports/tests/test_guesses.py.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .format import Array, Recording
from .rule import Stage

COLOURS = ("red", "green", "blue")


@dataclass(frozen=True)
class Parting:
    """A stage in the pictures where it parts.

    Attributes:
        stage: what is compared.
        pictures: those that part.
        reference: the recording.
    """

    stage: Stage
    pictures: Sequence[int]
    reference: Recording

    @cached_property
    def ours(self) -> Array:
        """The port's tokens, one picture below the other (N, C); of the pooled output one row of each."""
        return np.vstack([self.stage.port[one] for one in self.pictures])

    @cached_property
    def right(self) -> Array:
        """The reference's, as ``ours``."""
        return self.at(self.stage.name)

    def at(self, stage: str) -> Array:
        """The reference's at another stage, as ``ours``."""
        return np.vstack([self.reference.stages[one][stage] for one in self.pictures])


Guesses = Iterator[
    tuple[str, Array]
]  # in words, and the numbers that the port has then, as ``ours``


def share(ours: Array, right: Array) -> float:
    """The factor by which the reference's numbers come nearest to the port's."""
    return float(np.vdot(ours, right) / (np.vdot(right, right) + 1e-300))


def multiplied(parting: Parting) -> Guesses:
    """Every number is so many times as large."""
    factor = share(parting.ours, parting.right)
    words = f"every number is {factor:.4g} times the reference's"
    yield words if parting.ours.any() else "every number is zero", factor * parting.right


def another_stage(parting: Parting) -> Guesses:
    """They are another stage's numbers."""
    for name in parting.reference.order:
        if name != parting.stage.name:
            yield f"{name}'s numbers", parting.at(name)


def another_order_of_columns(parting: Parting) -> Guesses:
    """The numbers of each token are in another order; those of pixels by colours, say."""
    order = nearest_rows(parting.ours.T, parting.right.T)
    words = f"each token's numbers are in another order: {elsewhere(order)}"
    places = np.arange(len(order))
    colours = order[:3] % 3
    if np.array_equal(order, places - places % 3 + np.resize(colours, len(order))):
        words = f"the colours are {', '.join(COLOURS[one] for one in colours)}"
    yield words, parting.right[:, order]


def another_order_of_rows(parting: Parting) -> Guesses:
    """The tokens, or the pictures, are in another order."""
    order = nearest_rows(parting.ours, parting.right)
    words = "tokens or pictures are in another order (rows of all that part, one below the other)"
    yield f"{words}: {elsewhere(order)}", parting.right[order]


def another_range_of_colours(parting: Parting) -> Guesses:
    """Each colour is a straight line of the right one: another mean, deviation or range."""
    if parting.stage.name != "pixels":
        return
    ours = parting.ours.reshape(-1, 3)
    right = parting.right.reshape(-1, 3)
    centred = right - right.mean(0)
    slope = (centred * ours).mean(0) / (centred**2).mean(0)
    start = ours.mean(0) - slope * right.mean(0)
    # Bytes of 0 and 255 are these in the reference.
    about = parting.reference.about
    black = np.divide(np.negative(about["mean"]), about["std"])
    white = black + np.divide(1, about["std"])
    ends = [((slope * end + start).round(3) + 0.0).tolist() for end in (black, white)]
    made = slope * right + start
    yield (
        "in red, green, blue black is {} and white is {}".format(*ends),
        made.reshape(parting.ours.shape),
    )


def another_term(parting: Parting) -> Guesses:
    """What the stage adds to the one before it is so many times as large."""
    order = parting.reference.order
    before = order[order.index(parting.stage.name) - 1]
    base = parting.at(before)
    if base.shape == parting.right.shape:
        added = parting.right - base
        factor = share(parting.ours - base, added)
        words = f"what {parting.stage.name} adds to {before} is {factor:.4g} times the right one"
        yield words, base + factor * added


def one_vector(parting: Parting) -> Guesses:
    """One vector too much at each token."""
    off = parting.ours - parting.right
    words = "the same vector is added everywhere: perhaps a bias twice, or never"
    yield words, parting.right + off.mean(0)


def nearest_rows(ours: Array, right: Array) -> Array:
    """For each row (N, C) of the port that row of the reference which is nearest."""
    squares = np.square(right).sum(1)
    # One by one: a matrix of all distances takes gigabytes where there are many pictures.
    return np.array([(squares - 2 * (right @ row)).argmin() for row in ours])


def elsewhere(order: Array) -> str:
    """Which are not in their places, in words: the first ones."""
    moved = [f"{row} at {place}" for place, row in enumerate(order) if row != place]
    return ", ".join(moved[:3])


# In how many pictures each has to hold. What is fitted to the port's numbers fits the rounding of a single
# picture: 8 of 215 faults with 8-bit weights were said to be a vector that is added.
GUESSES: list[tuple[Callable[[Parting], Guesses], int]] = [
    (multiplied, 3),
    (another_stage, 1),
    (another_order_of_columns, 1),
    (another_range_of_colours, 3),
    (another_order_of_rows, 1),
    (another_term, 3),
    (one_vector, 3),
]
