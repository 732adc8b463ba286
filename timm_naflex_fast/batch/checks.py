"""Checks of arguments. Their errors say what is valid."""

import operator
from collections.abc import Sequence

from torch import Tensor

from ..resampling.spec import INTERPOLATIONS

MAX_COORDINATE = 2**31 - 1  # a coordinate: the cells of a grid can still be counted in int64


class InvalidCoordinateError(ValueError):
    """A coordinate that names no cell, where timm's ``pos_embed_use_grid_sample`` samples anyway."""


def check_size(size: Sequence[int]) -> tuple[int, int]:
    """``size`` as (h, w), Python's integers of at least 1; NumPy's are taken too."""
    try:
        h, w = (operator.index(n) for n in size)
    except (TypeError, ValueError):
        h = w = 0
    if min(h, w) < 1:
        raise ValueError(f"size must be two integers of at least 1; got {size!r}")
    return h, w


def check_interpolation(mode: str) -> None:
    """Refuse every mode but these."""
    if mode not in INTERPOLATIONS:
        valid = ", ".join(map(repr, INTERPOLATIONS))
        raise ValueError(f"mode={mode!r} is not supported; valid: {valid}")


def check_tokens(x: Tensor, channels: int, patch_coord: Tensor | None = None) -> None:
    """``x`` must be floating (B, N, channels), and ``patch_coord``, if given, (B, N, 2)."""
    shape = x.shape
    if len(shape) != 3 or shape[2] != channels:
        raise ValueError(
            f"x must be tokens of shape (B, N, {channels}), as wide as the table; "
            f"got {tuple(shape)}"
        )
    if not x.is_floating_point():
        raise ValueError(f"x must be floating point; got {x.dtype}")
    if patch_coord is None:
        return
    valid = (shape[0], shape[1], 2)
    if patch_coord.shape != valid:
        raise ValueError(
            f"patch_coord must hold (y, x) for each token, shape {valid} for the shape of x; "
            f"got {tuple(patch_coord.shape)}"
        )


def check_length(x: Tensor, grid_size: Sequence[int]) -> None:
    """``x`` (B, N, C) must have one token for each cell of ``grid_size`` (h, w)."""
    h, w = grid_size
    if x.shape[1] != h * w:
        raise ValueError(
            f"x must hold one token per cell of the {h} x {w} grid, {h * w}; "
            f"got shape {tuple(x.shape)}"
        )


def check_writable(x: Tensor) -> None:
    """Raise RuntimeError, as PyTorch's own ``add_`` does, if elements of ``x`` share memory.

    Our sums write into views, where PyTorch cannot see it.
    """
    if x.is_contiguous():
        return
    for stride, size in zip(x.stride(), x.shape):
        if stride == 0 and size > 1:
            raise RuntimeError(
                "x cannot be added to in place: several of its elements are one and the same "
                "memory location (as after expand()); clone() it before"
            )
