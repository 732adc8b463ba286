"""The plan of a batch: which samples share a grid, and how the table is resampled to the grids.

``tests/batch/test_grids.py`` reads plans.
"""

from typing import NamedTuple

from torch import Tensor

from ..resampling.spec import Resampling, Size

TokenCounts = list[tuple[int, int]]
"""For each sample, how many of its tokens take the cell they name, and how many come after."""


class Plan(NamedTuple):
    """The grids of a batch, and how the position table is resampled to them.

    Token n of a sample takes cell n of its grid, in row-major order.

    Args:
        samples: those of each distinct grid (h, w), by first appearance.
        counts: see :data:`TokenCounts`.
        cell_index: of the samples whose tokens stand in another order, the cells (tokens,) that
            they take.
        embeds_padding: the tokens that come after get cell 0, that of the coordinate (0, 0).
        resampling: of the table.
    """

    samples: dict[Size, list[int]]
    counts: TokenCounts
    cell_index: dict[int, Tensor]
    embeds_padding: bool
    resampling: Resampling
