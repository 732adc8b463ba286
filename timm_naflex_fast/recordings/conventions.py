"""The conventions by which models and their ports resample a position table, as one list.

Every convention is separable, ``A_h . P . A_w^T``, so one formula for the 1-D matrix ``A_n`` covers
them all. This file writes the formula out and does not read it off ``F.interpolate``, which has no
other cubic coefficient and no other positions. Nor does ``closed_form`` have them, whose positions
are rounded as PyTorch rounds them.
"""

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ..batch.layout import FrameSizes
from ..resampling.closed_form import cubic_kernel

# align_corners, positions: in words, the plainest first
POSITIONS = {
    (False, "half_pixel"): "half-pixel positions",
    (True, "corners"): "aligned corners",
    (False, "asymmetric"): "cell i at i * scale",
    (True, "half_pixel"): "the table from centre to centre, the grid from edge to edge",
    (False, "corners"): "the table from edge to edge, the grid from centre to centre",
}
# mode, cubic_coefficient
KERNELS = [("bilinear", None), ("bicubic", -0.5), ("bicubic", -0.75), ("nearest", None)]
# antialias, outside: in words, where it is not what PyTorch does
BORDERS = {
    (True, "dropped"): "",
    (False, "border"): "",
    (False, "dropped"): "taps outside dropped",
    (False, "zeros"): "taps outside zero",
    (True, "border"): "taps outside moved to the border",
    (True, "zeros"): "taps outside zero",
}
TRANSPOSED = {
    None: "",
    "order": "tokens column by column",
    "size": "sizes read as (w, h)",
    "table": "the table transposed",
}


class Convention(NamedTuple):
    """How a table (H0, W0, C) becomes the tokens of an (h, w) grid.

    Args:
        mode: "bilinear", "bicubic" or "nearest".
        cubic_coefficient: Keys' coefficient (bicubic only); PyTorch's is -0.5 with antialiasing and
            -0.75 without.
        antialias: the filter is as much wider as the table becomes smaller.
        outside: taps outside the table are "dropped" and the others made larger, so that they add
            up to 1 (PyTorch with antialiasing). Or they take the table's "border" (PyTorch without;
            ONNX with ``exclude_outside=0``), or are "zeros" (``grid_sample``'s own padding).
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
    outside: str = "dropped"
    align_corners: bool = False
    positions: str = "half_pixel"
    ar_preserving: bool = False
    transposed: str | None = None
    merge: int = 1

    def matrix(self, n: int, n0: int) -> Tensor:
        """``A_n`` (n, n0), float64. It may be shared: do not change it."""
        # What follows the two products does not change them.
        axis = self._replace(ar_preserving=False, transposed=None, merge=1)
        return _matrix(axis, n, n0)

    def aspects(self) -> list[str]:
        """What the convention says of each question, in words; the same questions in each list."""
        kernel = self.mode
        if self.cubic_coefficient is not None:
            kernel += f", coefficient {self.cubic_coefficient}"
        cut = blocks = ""
        if self.ar_preserving:
            cut = "resized to a square and cut"
        if self.merge > 1:
            blocks = f"tokens in blocks of {self.merge} x {self.merge}"
        return [
            kernel,
            "antialiased" if self.antialias else "no antialiasing",
            BORDERS[self.antialias, self.outside],
            POSITIONS[self.align_corners, self.positions],
            cut,
            TRANSPOSED[self.transposed],
            blocks,
        ]

    def words(self) -> str:
        """The convention in words.

        >>> Convention("bicubic", -0.75, antialias=False, outside="dropped").words()
        'bicubic, coefficient -0.75, no antialiasing, taps outside dropped'
        """
        plain = POSITIONS[False, "half_pixel"]
        return ", ".join(aspect for aspect in self.aspects() if aspect not in ("", plain))

    def differences(self, reference: "Convention") -> str:
        """What it says in other words than the reference does, or "the reference".

        >>> Convention("bilinear", None).differences(Convention(merge=2))
        'bilinear instead of bicubic, coefficient -0.5; not tokens in blocks of 2 x 2'
        """
        differences = []
        for own, expected in zip(self.aspects(), reference.aspects()):
            if own == expected:
                continue
            if not own:
                differences.append(f"not {expected}")
            elif not expected:
                differences.append(own)
            else:
                differences.append(f"{own} instead of {expected}")
        return "; ".join(differences) or "the reference"

    def tokens(
        self, table: Tensor, sizes: FrameSizes, weights_in: torch.dtype = torch.float64
    ) -> Tensor:
        """The tokens of all grids, packed (sum of t*h*w, C), of a table (H0, W0, C), float64.

        ``weights_in``: the precision to which the weights are rounded; the sums are float64's.
        """
        if self.transposed in ("size", "table"):
            table = table.transpose(0, 1)
        packed = []
        for frames, h, w in sizes:
            resized = [h, w]
            if self.ar_preserving:
                resized = [max(h, w)] * 2
            rows = self.matrix(resized[0], table.shape[0])[:h]  # (h, H0)
            columns = self.matrix(resized[1], table.shape[1])[:w]  # (w, W0)
            rows, columns = (axis.to(weights_in).double() for axis in (rows, columns))
            grid = torch.einsum("yh,hwc,xw->yxc", rows, table, columns)
            if self.transposed in ("size", "order"):
                grid = grid.transpose(0, 1)
            blocks = grid.unflatten(1, (-1, self.merge)).unflatten(0, (-1, self.merge))
            packed.append(blocks.transpose(1, 2).flatten(0, 3).repeat(frames, 1))
        return torch.cat(packed)


@lru_cache(maxsize=256)
def _matrix(axis: Convention, n: int, n0: int) -> Tensor:
    """The matrix (n, n0) of one axis, float64."""
    # How far each axis goes beyond the centres of its outermost cells.
    table_edge = 0.0 if axis.align_corners else 0.5
    grid_edge = 0.0 if axis.positions == "corners" else 0.5
    length = n - 1 + 2 * grid_edge
    step = 0.0
    if length:
        step = (n0 - 1 + 2 * table_edge) / length
    if axis.positions == "asymmetric":
        table_edge = grid_edge = 0.0
    elif axis.align_corners and axis.antialias:
        table_edge = grid_edge = 0.5  # PyTorch changes the step here and not the centres
    centres = step * (torch.arange(n).double() + grid_edge) - table_edge  # (n,)
    stretch = 1.0
    if axis.antialias:
        stretch = max(step, 1.0)
    return _weights(axis, centres, stretch, n0)


def _weights(axis: Convention, centres: Tensor, stretch: float, n0: int) -> Tensor:
    """What each of n0 cells, at 0, 1, ..., gives to n centres, (n, n0)."""
    beyond = math.ceil(2 * stretch) + 1  # how many cells outside a tap can reach
    cells = torch.arange(-beyond, n0 + beyond)
    if axis.mode == "nearest":
        nearest = centres.floor() if axis.positions == "asymmetric" else (centres + 0.5).floor()
        weights = (cells == nearest[:, None]).double()  # (n, cells)
    else:
        distance = (cells - centres[:, None]).abs() / stretch
        if axis.cubic_coefficient is not None:
            weights = cubic_kernel(distance, axis.cubic_coefficient)
        else:
            weights = (1 - distance).clamp(min=0)
    weights = weights / weights.sum(1, keepdim=True)
    before, matrix, after = weights.split([beyond, n0, beyond], 1)
    if axis.outside == "dropped":
        matrix = matrix / matrix.sum(1, keepdim=True)
    elif axis.outside == "border":
        matrix[:, 0] += before.sum(1)
        matrix[:, -1] += after.sum(1)
    return matrix


def conventions(sizes: FrameSizes) -> Iterator[Convention]:
    """Every convention that these sizes allow, the plainest ones first.

    Those that share the matrices of their axes follow one another, so each is made once.
    """
    merges = [m for m in (1, 2, 3, 4) if all(h % m == w % m == 0 for _, h, w in sizes)]
    for position, border, kernel in product(POSITIONS, BORDERS, KERNELS):
        axis = Convention(*kernel, *border, *position)
        if _is_another_name(axis):
            continue
        for merge, transposed, cut in product(merges, TRANSPOSED, (False, True)):
            yield axis._replace(ar_preserving=cut, transposed=transposed, merge=merge)


def _is_another_name(axis: Convention) -> bool:
    """Whether another convention, which is listed, gives the same matrices."""
    if axis.mode == "nearest":
        return (axis.antialias, axis.outside) != (False, "border")
    if axis.mode == "bicubic" or axis.antialias:
        return False
    # With bilinear weights "dropped" gives what "border" gives; with aligned corners nothing lies
    # outside.
    return axis.outside == "dropped" or (axis.align_corners and axis.outside == "zeros")
