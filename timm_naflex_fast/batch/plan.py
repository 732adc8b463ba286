"""The plan of a batch: which samples share a grid, and how tables are resampled to the grids.

``tests/batch/test_grids.py`` reads plans.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from ..resampling.spec import Resampling, Size

TokenCounts = list[tuple[int, int]]
"""For each sample, how many of its tokens take the cell they name, and how many come after."""


@dataclass
class Group:
    """The samples of one batch that share a grid of ``h`` x ``w`` cells.

    Token n of a sample takes cell n of the grid, in row-major order. With ``order`` (h*w,) it takes
    cell ``order[n]``; in a sample with a ``cell_index`` (tokens,) of its own the cell named there.
    With ``embeds_padding`` the tokens after them get cell 0, that of the coordinate (0, 0). Plans by
    sizes have an ``order``, plans by coordinates a ``cell_index``: no group has both.
    """

    h: int
    w: int
    samples: list[int] = field(default_factory=list)
    order: Tensor | None = None
    cell_index: dict[int, Tensor] = field(default_factory=dict)
    embeds_padding: bool = False


class Plan(NamedTuple):
    """The grids of a batch, and how position tables are resampled to them."""

    groups: dict[Size, Group]
    counts: TokenCounts
    resampling: Resampling
