"""The conventions by which models and their ports resample a position table, as one list.

Every convention is separable, ``A_h . P . A_w^T``, so one formula for the 1-D matrix ``A_n`` covers
them all. This file writes the formula out and does not read it off ``F.interpolate``, which has no
other cubic coefficient and no other positions. Nor does ``closed_form`` have them, whose positions
are rounded as PyTorch rounds them.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ..batch.layout import FrameSizes
from ..resampling.closed_form import cubic_kernel

OUTSIDE = 2  # cells beyond a border that a tap without antialiasing can reach


class Convention(NamedTuple):
    """How a table (H0, W0, C) becomes the tokens of an (h, w) grid.

    Args:
        mode: "bilinear" or "bicubic".
        cubic_coefficient: Keys' coefficient (bicubic only); PyTorch's is -0.5 with antialiasing and
            -0.75 without.
        antialias: the filter is as much wider as the table becomes smaller.
        outside: without antialiasing, taps outside the table take its "border", are "dropped", as
            they always are with antialiasing, or are "zeros" (``grid_sample``'s own padding).
        align_corners: the table's axis goes from the centre of its first cell to that of its last
            one; without it, from edge to edge.
        positions: the grid's axis goes from edge to edge ("half_pixel"), or from centre to centre
            ("corners"). Or cell i lies at i * scale ("asymmetric").
        ar_preserving: resized to (L, L), L = max(h, w), then cut to the top-left (h, w).
        transposed: None, or what was taken for its transpose: the tokens' "order", the "size", or
            the "table".
        merge: tokens come in blocks of merge x merge cells.
    """

    mode: str = "bicubic"
    cubic_coefficient: float | None = -0.5
    antialias: bool = True
    outside: str = "border"
    align_corners: bool = False
    positions: str = "half_pixel"
    ar_preserving: bool = False
    transposed: str | None = None
    merge: int = 1

    def matrix(self, n: int, n0: int) -> Tensor:
        """``A_n`` (n, n0), float64."""
        # How far each axis goes beyond the centres of its outermost cells.
        table_edge = 0.0 if self.align_corners else 0.5
        grid_edge = 0.0 if self.positions == "corners" else 0.5
        length = n - 1 + 2 * grid_edge
        step = 0.0
        if length:
            step = (n0 - 1 + 2 * table_edge) / length
        if self.positions == "asymmetric":
            table_edge = grid_edge = 0.0
        elif self.align_corners and self.antialias:
            table_edge = grid_edge = 0.5  # PyTorch changes the step here and not the centres
        centres = step * (torch.arange(n).double() + grid_edge) - table_edge
        return self._weights(centres, step, n0)

    def _weights(self, centres: Tensor, step: float, n0: int) -> Tensor:
        """What each of n0 cells, at 0, 1, ..., gives to n centres a step apart, (n, n0)."""
        stretch = 1.0
        if self.antialias:
            stretch = max(step, 1.0)
        cells = torch.arange(-OUTSIDE, n0 + OUTSIDE)
        distance = (cells - centres[:, None]).abs() / stretch  # (n, cells)
        if self.cubic_coefficient is None:
            weights = (1 - distance).clamp(min=0)
        else:
            weights = cubic_kernel(distance, self.cubic_coefficient)
        before, matrix, after = weights.split([OUTSIDE, n0, OUTSIDE], 1)
        if self.antialias or self.outside == "dropped":
            matrix = matrix / matrix.sum(1, keepdim=True)
        elif self.outside == "border":
            matrix[:, 0] += before.sum(1)
            matrix[:, -1] += after.sum(1)
        return matrix

    def tokens(self, table: Tensor, sizes: FrameSizes) -> Tensor:
        """The tokens of all grids, packed (sum of t*h*w, C), of a table (H0, W0, C), float64."""
        if self.transposed in ("size", "table"):
            table = table.transpose(0, 1)
        packed = []
        for frames, h, w in sizes:
            resized = [h, w]
            if self.ar_preserving:
                resized = [max(h, w)] * 2
            rows = self.matrix(resized[0], table.shape[0])[:h]
            columns = self.matrix(resized[1], table.shape[1])[:w]
            grid = torch.einsum("yh,hwc,xw->yxc", rows, table, columns)
            if self.transposed in ("size", "order"):
                grid = grid.transpose(0, 1)
            blocks = grid.unflatten(1, (-1, self.merge)).unflatten(0, (-1, self.merge))
            packed.append(blocks.transpose(1, 2).flatten(0, 3).repeat(frames, 1))
        return torch.cat(packed)


# mode, cubic_coefficient
KERNELS = [("bilinear", None), ("bicubic", -0.5), ("bicubic", -0.75)]
# antialias, outside
BORDERS = [(True, "border"), (False, "border"), (False, "dropped"), (False, "zeros")]
# align_corners, positions
POSITIONS = [
    (False, "half_pixel"),
    (True, "corners"),
    (False, "asymmetric"),
    (True, "half_pixel"),
    (False, "corners"),
]


def conventions(sizes: FrameSizes) -> Iterator[Convention]:
    """Every convention that these sizes allow, the plainest ones first."""
    merges = [m for m in (1, 2, 3, 4) if all(h % m == w % m == 0 for _, h, w in sizes)]
    choices = product(
        merges,
        (None, "order", "size", "table"),  # transposed
        (False, True),  # ar_preserving
        POSITIONS,
        BORDERS,
        KERNELS,
    )
    for merge, transposed, ar_preserving, position, border, kernel in choices:
        convention = Convention(*kernel, *border, *position, ar_preserving, transposed, merge)
        # With bilinear weights "dropped" gives what "border" gives; with aligned corners nothing lies
        # outside.
        same = ["dropped"]
        if convention.align_corners:
            same = ["dropped", "zeros"]
        if convention.mode == "bicubic" or convention.outside not in same:
            yield convention
