"""Which convention did a port (a model written anew for another library) follow when it resampled a
position table?

All of them are tried, the best comes first. Every convention is separable, ``A_h . P . A_w^T``, so
one formula for the 1-D matrix ``A_n`` covers them all. This file writes the formula out and does
not read it off ``F.interpolate``, which has no other cubic coefficient and no other positions. Nor
does ``closed_form`` have them, whose positions are rounded as PyTorch rounds them.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .batch.layout import FrameSizes, sizes_on_host
from .resampling.closed_form import cubic_kernel

DECIMALS = 9  # decimals of an error; conventions that agree on the sizes at hand have the same ones
OUTSIDE = 2  # cells beyond a border that a tap without antialiasing can reach
SOME_CHANNELS = 32  # all follow the same convention, so that some of them find the best ones
BEST = 10


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


def identify_resampling(
    table: Tensor, size: Any, result: Tensor
) -> list[tuple[float, dict[str, Any]]]:
    """Find the convention by which ``table`` was resampled to ``result``.

    Args:
        table: (H0, W0, C) or (1, H0, W0, C), floating point.
        size: (h, w) or, with t frames, (t, h, w); (B, 2) or (B, 3) for results packed one after the
            other. A tensor or a sequence.
        result: the tokens, (sum of t*h*w, C), or any shape with as many elements in that order; or
            padded, (B, N, C), of which each image's first t*h*w tokens are looked at.

    Returns:
        ``(error, settings)`` of every convention, the smallest error first: the largest difference,
        relative to the largest absolute value of ``result``. ``settings`` are the fields of
        :class:`Convention`. Of conventions that agree on these sizes, the plainest comes first: a
        table made larger shows nothing of antialiasing.

    Raises:
        ValueError: tensors that are not floating point, shapes that do not fit, sizes below 1,
            numbers that are not finite, or a table that tells nothing: what is the same in every
            cell, every convention keeps.

    >>> from timm_naflex_fast.functional import resample_pos_embed
    >>> table = torch.randn(16, 16, 8)
    >>> result = resample_pos_embed(table, (9, 28), mode="bilinear")
    >>> error, convention = identify_resampling(table, (9, 28), result)[0]
    >>> convention["mode"], convention["antialias"], error < 1e-5
    ('bilinear', True, True)
    """
    table = _float64("table", table)
    if table.ndim == 4:
        table = table.squeeze(0)
    if table.ndim != 3 or (table == table[:1, :1]).all():
        raise ValueError(
            f"table must be ([1,] H0, W0, C) and differ from cell to cell; got {tuple(table.shape)}"
        )
    sizes = sizes_on_host(torch.atleast_2d(torch.as_tensor(size)))
    result = _packed(_float64("result", result), sizes, table.shape[-1])
    some = result[:, :SOME_CHANNELS]
    ranked = _ranked(conventions(sizes), table[..., :SOME_CHANNELS], sizes, some)
    best = _ranked([convention for _, convention in ranked[:BEST]], table, sizes, result)
    return [(error, convention._asdict()) for error, convention in best + ranked[BEST:]]


def _float64(name: str, tensor: Tensor) -> Tensor:
    """The tensor in float64, on the host."""
    is_float = isinstance(tensor, Tensor) and tensor.is_floating_point()
    if not is_float or not tensor.isfinite().all():
        raise ValueError(f"{name} must be a tensor of finite floating point numbers")
    return tensor.detach().cpu().double()


def _packed(result: Tensor, sizes: FrameSizes, channels: int) -> Tensor:
    """The tokens of all images without padding, (sum of t*h*w, C)."""
    counts = [t * h * w for t, h, w in sizes]
    if result.ndim == 3 and len(result) == len(sizes):
        result = torch.cat([image[:count] for image, count in zip(result, counts)])
    if result.numel() != sum(counts) * channels:
        raise ValueError(
            f"result must have {sum(counts)} tokens of {channels} channels; got shape "
            f"{tuple(result.shape)}"
        )
    return result.reshape(-1, channels)


def _ranked(
    tried: Iterable[Convention], table: Tensor, sizes: FrameSizes, result: Tensor
) -> list[tuple[float, Convention]]:
    """The conventions by error, those with the same one in the order in which they come."""
    largest = result.abs().max()
    ranked = []
    for convention in tried:
        error = (result - convention.tokens(table, sizes)).abs().max() / largest
        ranked.append((error.item(), convention))
    return sorted(ranked, key=lambda pair: round(pair[0], DECIMALS))
