"""The plan of a batch: which of its tokens take which cells of a grid, and how the table is resampled.

``tests/batch/test_grids.py`` reads plans.
"""

from typing import NamedTuple

from torch import Tensor

from ..resampling.spec import ResizeSpec, Size


class Run(NamedTuple):
    """Tokens that stand side by side and take cells of one grid.

    They are ``x[samples, tokens]`` of a batch (B, N, C): more than one sample where all have the
    same grid in the same order.
    """

    samples: slice
    tokens: slice
    cells: int | Tensor
    """Each token takes one of the first so many cells, in row-major order; with 1, all take the
    first cell. Or the number of each token's cell (tokens,)."""


Runs = dict[Size, list[Run]]  # of each distinct grid (h, w), by first appearance


class Plan(NamedTuple):
    """Which tokens take which cells, and how the table is resampled."""

    runs: Runs
    spec: ResizeSpec
