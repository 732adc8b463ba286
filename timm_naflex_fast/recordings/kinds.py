"""By what kind of difference do a port's numbers differ from a reference's? In words.

Tests: tests/recordings/test_compare.py.
"""

import numpy as np

from .format import Array, Stages

CLOSE = 20  # times the limit: what may be left once a kind is taken off
LEFT = 0.1  # of the difference: so little is left then


def kind_of(stage: str, ours: Array, theirs: Array, reference: Stages, limit: float) -> str:
    """Say by what kind all numbers differ; nothing where it is none that is looked for.

    Args:
        stage: where it is.
        ours: the port's numbers (tokens, channels), (channels,) or a grid (2,), float64.
        theirs: the reference's, of the same shape.
        reference: all stages of the reference for this picture.
        limit: the largest difference that is rounding.
    """
    if stage == "grid":
        rows, columns = map(int, theirs)
        return f"the grid is {tuple(map(int, ours))}, not {(rows, columns)}"
    close = min(CLOSE * limit, LEFT * float(np.abs(ours - theirs).max()))
    for words in (
        _constant(ours, theirs, close),
        _earlier_stage(stage, ours, reference, close),
        _order(ours, theirs, close),
    ):
        if words:
            return words
    return ""


def _constant(ours: Array, theirs: Array, close: float) -> str:
    """A factor or an offset that is the same everywhere."""
    squares = float((theirs * theirs).sum())
    factor = float((ours * theirs).sum()) / squares if squares else 0.0
    if np.abs(ours - factor * theirs).max() <= close:
        return f"every number is {factor:.6g} times the reference's"
    offset = float((ours - theirs).mean())
    if np.abs(ours - theirs - offset).max() <= close:
        return f"every number is the reference's plus {offset:.6g}"
    # Straight lines through all numbers: another mean and deviation.
    slope, start = np.polyfit(theirs.ravel(), ours.ravel(), 1)
    if np.abs(ours - slope * theirs - start).max() <= close:
        return f"every number is the reference's times {slope:.6g} plus {start:.6g}"
    if ours.ndim == 2 and len(ours) > 1:
        offsets = (ours - theirs).mean(0)
        if np.abs(ours - theirs - offsets).max() <= close:
            return "each channel has an offset of its own, the same in all tokens: a bias"
    return ""


def _earlier_stage(stage: str, ours: Array, reference: Stages, close: float) -> str:
    """The port's numbers are those of a stage before."""
    for name, numbers in reference.items():
        if name == stage:
            break
        if numbers.shape == ours.shape and np.abs(ours - numbers).max() <= close:
            return f"the numbers are those of {name}: what comes between is left out"
    return ""


def _order(ours: Array, theirs: Array, close: float) -> str:
    """The same tokens or channels, in another order."""
    if ours.ndim == 1:
        ours, theirs = ours[None], theirs[None]
    for what, own, other in (("tokens", ours, theirs), ("channels", ours.T, theirs.T)):
        if len(own) < 2 or own.shape[1] < 1:
            continue
        squares = (own**2).sum(1)[:, None] + (other**2).sum(1) - 2 * own @ other.T
        order = squares.argmin(1)
        moved = int((order != np.arange(len(order))).sum())
        if moved and len(set(order)) == len(order) and np.abs(own - other[order]).max() <= close:
            shown = ", ".join(f"{place} holds {source}" for place, source in enumerate(order[:4]))
            return f"the {what} are in another order ({shown}, ...): {moved} of {len(order)} moved"
    return ""


def place_of(ours: Array, theirs: Array, limit: float) -> str:
    """Which of the numbers differ."""
    beyond = np.abs(ours - theirs) > limit
    count = f"{beyond.sum():,} of {beyond.size:,} numbers differ by more than rounding"
    if beyond.ndim < 2:
        return count
    tokens = beyond.any(1)
    channels = beyond.any(0)
    if tokens.sum() < len(tokens):
        count += f", in {tokens.sum()} of {len(tokens)} tokens (first: {int(tokens.argmax())})"
    if channels.sum() < len(channels):
        count += (
            f", in {channels.sum()} of {len(channels)} channels (first: {int(channels.argmax())})"
        )
    return count
