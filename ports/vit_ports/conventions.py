"""The conventions by which models and their ports resample a position table, as one list.

Every convention is separable, ``A_h . P . A_w^T``, so one formula for the 1-D matrix ``A_n`` covers
them all. This file writes the formula out and does not read it off ``F.interpolate``, which has no
other cubic coefficient and no other positions. Nor does ``closed_form`` have them, whose positions
are rounded as PyTorch rounds them. It needs NumPy alone, so ``compare`` answers at once.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np

from .format import Array

FrameSizes = Sequence[tuple[int, int, int]]  # frames, rows, columns
# align_corners, positions: in words, where they are not half-pixel positions; the plainest first
POSITIONS = {
    (False, "half_pixel"): "",
    (True, "corners"): "aligned corners",
    (False, "asymmetric"): "cell i at i * scale",
    (True, "half_pixel"): "the table from centre to centre, the grid from edge to edge",
    (False, "corners"): "the table from edge to edge, the grid from centre to centre",
    (False, "scale_factor"): "scale_factor=(n + 0.1) / N0, as DINO has it",
}
# mode, cubic_coefficient
KERNELS = [
    ("bilinear", None),
    ("bicubic", -0.5),
    ("bicubic", -0.75),
    ("nearest", None),
    ("area", None),
]
# antialias, outside: in words, where it is not what PyTorch does
BORDERS = {
    (True, "dropped"): "",
    (False, "border"): "",
    (False, "dropped"): "taps outside dropped",
    (False, "zeros"): "taps outside zero",
    (True, "border"): "taps outside moved to the border",
    (True, "zeros"): "taps outside zero",
}
SMOOTHING = {True: "antialiased", False: "no antialiasing"}
CUT = {False: "", True: "resized to a square and cut"}
TRANSPOSED = {
    None: "",
    "order": "tokens column by column",
    "size": "sizes read as (w, h)",
    "table": "the table transposed",
}
BLOCKS = {
    1: "",
    2: "tokens in blocks of 2 x 2",
    3: "tokens in blocks of 3 x 3",
    4: "tokens in blocks of 4 x 4",
}
OF_AXIS = 6  # settings: the others tell what becomes of the two matrices


class Convention(NamedTuple):
    """How a table (H0, W0, C) becomes the tokens of an (h, w) grid.

    Args:
        mode: "bilinear", "bicubic" or "nearest"; or "area": each cell counts by what the grid's cell
            covers of it (OpenCV's INTER_AREA).
        cubic_coefficient: Keys' coefficient (bicubic only); PyTorch's is -0.5 with antialiasing and
            -0.75 without.
        antialias: the filter is as much wider as the table becomes smaller.
        outside: taps outside the table are "dropped" and the others made larger, so that they add
            up to 1 (PyTorch with antialiasing). Or they take the table's "border" (PyTorch without;
            ONNX with ``exclude_outside=0``), or are "zeros" (``grid_sample``'s own padding).
        align_corners: the table's axis goes from the centre of its first cell to that of its last
            one; without it, from edge to edge.
        positions: the grid's axis goes from edge to edge ("half_pixel"), or from centre to centre
            ("corners"). Or cell i lies at i * scale ("asymmetric"). Or the grid is 0.1 cells longer
            ("scale_factor"): so ports of DINO keep the size from being rounded down.
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

    def words(self) -> str:
        """The convention in words.

        >>> Convention("bicubic", -0.75, antialias=False, outside="dropped").words()
        'bicubic, coefficient -0.75, no antialiasing, taps outside dropped'
        """
        mode = self.mode
        if self.cubic_coefficient:
            mode += f", coefficient {self.cubic_coefficient}"
        said = [
            mode,
            SMOOTHING[self.antialias],
            BORDERS[self.antialias, self.outside],
            POSITIONS[self.align_corners, self.positions],
            CUT[self.ar_preserving],
            TRANSPOSED[self.transposed],
            BLOCKS[self.merge],
        ]
        return ", ".join(filter(None, said))

    def tokens(self, table: Array, sizes: FrameSizes) -> Array:
        """The tokens of all grids, packed (sum of t*h*w, C), of a table (H0, W0, C), float64."""
        if self.transposed in ("size", "table"):
            table = table.transpose(1, 0, 2)
        axis = self[:OF_AXIS]  # what follows the two products does not change them
        packed = []
        for frames, h, w in sizes:
            height = h
            width = w
            if self.ar_preserving:
                height = width = max(h, w)
            rows = _matrix(height, table.shape[0], *axis)  # (height, H0)
            columns = _matrix(width, table.shape[1], *axis)  # (width, W0)
            halfway = np.tensordot(rows[:h], table, 1)  # (h, W0, C)
            grid = columns[:w] @ halfway  # (h, w, C)
            if self.transposed in ("size", "order"):
                grid = grid.transpose(1, 0, 2)
            high, wide, channels = grid.shape
            side = self.merge
            # Block by block, and in each of them row by row.
            rows_of_blocks = high // side
            cells = grid.reshape(rows_of_blocks, side, wide // side, side, channels)
            blocks = cells.transpose(0, 2, 1, 3, 4)
            one = blocks.reshape(-1, channels)  # (h * w, C)
            packed.append(np.tile(one, (frames, 1)))  # (t * h * w, C)
        return np.concatenate(packed)


@lru_cache(maxsize=256)
def _matrix(
    n: int,
    n0: int,
    mode: str,
    cubic_coefficient: float | None,
    antialias: bool,
    outside: str,
    align_corners: bool,
    positions: str,
) -> Array:
    """``A_n`` (n, n0) of one axis, float64. It is shared: do not change it."""
    if mode == "area":
        return _covered(n, n0)
    # How far each axis goes beyond the centres of its outermost cells.
    table_edge = 0.0 if align_corners else 0.5
    grid_edge = 0.0 if positions == "corners" else 0.5
    length = n - 1 + 2 * grid_edge
    # PyTorch takes equal sizes as they are, but not in bicubic mode.
    if positions == "scale_factor" and (n != n0 or mode == "bicubic"):
        length += 0.1
    table_length = n0 - 1 + 2 * table_edge
    step = table_length / length if length else 0.0
    if positions == "asymmetric":
        table_edge = grid_edge = 0.0
    elif align_corners and antialias:
        table_edge = grid_edge = 0.5  # PyTorch changes the step here and not the centres
    in_grid = np.arange(n) + grid_edge  # (n,)
    centres = step * in_grid - table_edge
    stretch = max(step, 1.0) if antialias else 1.0
    beyond = math.ceil(2 * stretch) + 1  # how many cells outside a tap can reach
    cells = np.arange(-beyond, n0 + beyond)
    distance = np.abs(cells - centres[:, None]) / stretch  # (n, cells)
    if mode == "nearest":
        half = 0.0 if positions == "asymmetric" else 0.5
        nearest = np.floor(centres + half)
        weights = (cells == nearest[:, None]).astype(float)
    elif cubic_coefficient is None:
        weights = np.maximum(1 - distance, 0)
    else:
        weights = _cubic_kernel(distance, cubic_coefficient)
    return _with_borders(weights, cells, n0, outside)


def _covered(n: int, n0: int) -> Array:
    """``A_n`` (n, n0): what each grid cell covers of each of the table's, as a share of it."""
    starts = np.arange(n)[:, None] * n0 / n  # (n, 1)
    cells = np.arange(n0)
    covered = np.minimum(starts + n0 / n, cells + 1) - np.maximum(starts, cells)
    return covered.clip(0) * n / n0


def _with_borders(weights: Array, cells: Array, n0: int, outside: str) -> Array:
    """Weights (n, cells) of cells of which some lie outside a table, as weights (n, n0) of the table's."""
    weights = weights / weights.sum(1, keepdims=True)
    # Which of the table's cells each of them is.
    inside = cells.clip(0, n0 - 1)
    if outside != "border":
        weights = weights * (cells == inside)
    if outside == "dropped":
        weights = weights / weights.sum(1, keepdims=True)
    is_cell = inside[:, None] == np.arange(n0)  # (cells, n0)
    return weights @ is_cell


def _cubic_kernel(distance: Array, a: float) -> Array:
    """The cubic convolution kernel of Keys (1981) at distances of 0 and more."""
    # Up to one cell away, and up to two.
    squared = distance**2
    cubed = distance**3
    near = (a + 2) * cubed - (a + 3) * squared + 1
    far = a * (cubed - 5 * squared + 8 * distance - 4)
    tail = np.where(distance < 2, far, 0.0)
    return np.where(distance < 1, near, tail)


def conventions(sizes: FrameSizes) -> Iterator[Convention]:
    """Every convention that these sizes allow, the plainest ones first.

    Those that share the matrices of their axes follow one another, so each is made once.
    """
    merges = []
    for merge in BLOCKS:
        if not any(h % merge or w % merge for _, h, w in sizes):
            merges.append(merge)
    for position, border, kernel in product(POSITIONS, BORDERS, KERNELS):
        axis = Convention(*kernel, *border, *position)
        if _is_another_name(axis):
            continue
        for merge, transposed, cut in product(merges, TRANSPOSED, (False, True)):
            yield axis._replace(ar_preserving=cut, transposed=transposed, merge=merge)


def _is_another_name(axis: Convention) -> bool:
    """Whether another convention, which is listed, gives the same matrices."""
    if axis.mode == "area":
        return axis != Convention("area", None)
    if axis.mode == "nearest":
        return axis.antialias or axis.outside != "border"
    if axis.mode == "bicubic" or axis.antialias:
        return False
    # Bilinear weights alone: "dropped" gives what "border" gives, and with aligned corners nothing
    # lies outside.
    if axis.align_corners and axis.outside == "zeros":
        return True
    return axis.outside == "dropped"
