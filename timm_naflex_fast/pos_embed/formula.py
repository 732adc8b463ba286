"""Resize weights in closed form, from coordinates and lengths that are tensors, and embeddings by them.

``weights.py`` reads PyTorch's weights off ``F.interpolate``, whose sizes the host must
know. A graph does not know them. This file computes the same weights where the coordinates are, in
float32 alone: many devices and runtimes have no float64. It is also what knows where timm's flag
samples, for graphs and for the host.

Scale and centre are rounded exactly as PyTorch rounds them; at a table of 128 cells another
rounding of the scale alone would move a weight by 8e-6. The weights are then within 1e-6 of
PyTorch's own, bilinear ones within 2e-7, for tables of up to 128 cells.

Tests: tests/pos_embed/test_formula.py, and tests/pos_embed/test_graphs.py for whole embeddings.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .precision import unrounded_dtype, unrounded_product
from .table import ResizeSpec


class TokenPositions(NamedTuple):
    """The grid (h, w) of each sample, or the size to which the table is resized for it, and where on
    it each token lies.

    A position is NaN where the host would raise an error; with timm's grid_sample flag only where
    a coordinate is not finite.
    """

    h: Tensor  # (B, 1) float32
    w: Tensor  # (B, 1) float32
    y: Tensor  # (B, N) float32
    x: Tensor  # (B, N) float32

    @classmethod
    def of(cls, sizes: Tensor, coord: Tensor) -> "TokenPositions":
        """Those of grids (B, 2) and coordinates (B, N, 2), float32.

        By indices, here and elsewhere in graphs: ExecuTorch 1.5 would fix the number of images where
        a tensor is split or unbound.
        """
        return cls(sizes[:, :1], sizes[:, 1:], coord[..., 0], coord[..., 1])


def embeddings_at(table: Tensor, positions: TokenPositions, spec: ResizeSpec) -> Tensor:
    """The embeddings (B, N, C) of tokens from a table (H0, W0, C), in float32 at least."""
    positions = _resized(table, positions, spec)
    # Both give the same sums. Gathered taps read only the cells that have a weight, a product reads
    # every cell of the table for each token. On a CPU taps cost less from 128 rows on, bilinear
    # from 32 (measured).
    taps = 16 if spec.interpolation == "bicubic" else 4
    if not spec.antialias and 8 * taps <= table.shape[0]:
        return _gathered_taps(table, positions, spec)
    return _one_product(table, positions, spec)


def _resized(table: Tensor, positions: TokenPositions, spec: ResizeSpec) -> TokenPositions:
    """The same with the cells to which each axis is resized, before the crop, as h and w."""
    if not spec.ar_preserving:
        return positions
    h, w, y, x = positions
    h0, w0, _ = table.shape
    own_h, own_w = spec.own_size((h0, w0)) or (0, 0)  # which no grid has
    is_own = (h == own_h) & (w == own_w)
    longest = torch.maximum(h, w)
    return TokenPositions(torch.where(is_own, h, longest), torch.where(is_own, w, longest), y, x)


def _one_product(table: Tensor, positions: TokenPositions, spec: ResizeSpec) -> Tensor:
    """One product with a row of H0*W0 weights for each token: (B, N, C)."""
    h0, w0, _ = table.shape
    dtype = unrounded_dtype(table)
    y = axis_weights(positions.y, positions.h, h0, spec).to(dtype)  # (B, N, H0)
    x = axis_weights(positions.x, positions.w, w0, spec).to(dtype)  # (B, N, W0)
    # Resizing is separable: a cell's weight is its row's times its column's.
    weights = y[..., :, None] * x[..., None, :]  # (B, N, H0, W0)
    embeddings = unrounded_product(weights.view(-1, h0 * w0), table.to(dtype).flatten(0, 1))
    return embeddings.unflatten(0, positions.y.shape)


def _gathered_taps(table: Tensor, positions: TokenPositions, spec: ResizeSpec) -> Tensor:
    """The same in float32 by one gathered row of the table for each pair of taps."""
    h0, w0, _ = table.shape
    flat = table.to(torch.promote_types(table.dtype, torch.float32)).flatten(0, 1)  # (H0*W0, C)
    rows, row_weights = tap_weights(positions.y, positions.h, h0, spec)  # (B, N, taps)
    cols, col_weights = tap_weights(positions.x, positions.w, w0, spec)
    cells = rows[..., :, None] * w0 + cols[..., None, :]  # (B, N, taps, taps)
    weights = (row_weights[..., :, None] * col_weights[..., None, :]).to(flat.dtype)
    # Tap after tap: all at once would be 16 embeddings (B, N, C) in memory.
    embeddings = torch.zeros((), dtype=flat.dtype, device=flat.device)
    cells, weights = cells.flatten(2), weights.flatten(2)  # (B, N, taps * taps)
    for tap in range(cells.shape[-1]):
        row = F.embedding(cells[..., tap], flat)  # (B, N, C)
        embeddings = embeddings + row * weights[..., tap, None]
    return embeddings


def axis_weights(position: Tensor, n: Tensor, n0: int, spec: ResizeSpec) -> Tensor:
    """Row ``position`` of the matrix that resizes an axis of ``n0`` cells to ``n``.

    Args:
        position: float32, any shape. A whole number, 0 <= position < n; with timm's grid_sample
            flag any number; NaN gives NaN.
        n: the cells to which the axis is resized; float32, broadcasts with ``position``.
        n0: cells of the table on this axis.
        spec: its interpolation, antialias, align_corners and samples.

    Returns:
        The weights (..., n0), float32.
    """
    cells = torch.arange(n0, device=position.device)
    if not spec.antialias:
        taps, weights = tap_weights(position, n, n0, spec)  # (..., taps) each
        is_read = taps[..., None] == cells  # (..., taps, n0)
        return (weights[..., None] * is_read).sum(-2)
    # The filter is stretched where the table shrinks, and taps outside the table are left out. All
    # in PyTorch's order of operations.
    scale = _scale(n, n0, spec)[..., None]
    centre = scale * (position + 0.5)[..., None]
    stretch = scale.clamp(min=1)
    weights = kernel((cells - centre + 0.5).abs() * (1 / stretch), spec)
    if spec.interpolation == "bilinear":
        # At its ends the triangle has weights of up to 3e-6, unless PyTorch's rounded ends leave
        # these cells out.
        after = cells + 1
        is_read = (centre - stretch + 0.5 < after) & (after <= centre + stretch + 0.5)
        weights = weights * is_read
    return weights / weights.sum(-1, keepdim=True)


def tap_weights(position: Tensor, n: Tensor, n0: int, spec: ResizeSpec) -> tuple[Tensor, Tensor]:
    """Without antialiasing, the table cells that a position reads, and their weights.

    Taps beyond the table are moved to its border, as PyTorch does, so a cell may be named twice.

    Returns:
        int64 cells and float32 weights, both (..., 2), or (..., 4) for bicubic.
    """
    centre = _centre(position, n, n0, spec)
    before, after = -1, 3
    if spec.interpolation != "bicubic":
        before, after = 0, 2
        # Beyond the border PyTorch reads the border's cell, and with weight 0 the one beside it.
        centre = centre.clamp(0, n0 - 1)
    offsets = torch.arange(before, after, device=centre.device)
    first = centre.floor()
    distance = ((centre - first)[..., None] - offsets).abs()
    weights = kernel(distance, spec)
    taps = (first[..., None] + offsets).clamp(0, n0 - 1)
    # A NaN names no cell. Its weight is NaN, whatever cell it takes.
    return taps.nan_to_num(0).long(), weights


def kernel(distance: Tensor, spec: ResizeSpec) -> Tensor:
    """The triangle, or the cubic convolution kernel of Keys (1981), at distances of 0 and more.

    Both pieces of the cubic one are written as products: next to their zeros, sums would lose
    digits in float32.
    """
    if spec.interpolation != "bicubic":
        return (1 - distance).clamp(min=0)
    a = -0.5 if spec.antialias else -0.75  # as in PyTorch
    distance = distance.clamp(max=2)  # from there on it is 0
    near = (1 - distance) * (1 + distance - (a + 2) * distance * distance)
    far = a * (distance - 1) * (distance - 2) * (distance - 2)
    return torch.where(distance < 1, near, far)


def _scale(n: Tensor, n0: int, spec: ResizeSpec) -> Tensor:
    """Table cells for each position, float32."""
    if not spec.align_corners:
        return divide(n0, n)
    return divide(n0 - 1, (n - 1).clamp(min=1)) * (n > 1)


def _centre(position: Tensor, n: Tensor, n0: int, spec: ResizeSpec) -> Tensor:
    """Where a position lies on the table's axis, without antialiasing: float32."""
    if spec.samples:
        # Where timm's flag puts a cell in [-1, 1], and the cells between -1 and 1.
        if spec.align_corners:
            place = divide(2 * position, (n - 1).clamp(min=1)) - 1
            cells = n0 - 1
        else:
            place = divide(2 * position + 1, n) - 1
            cells = n0
        # ``F.grid_sample`` adds 1 to the place, which is exact here, and multiplies. Written so,
        # OpenVINO would cancel the 1 that was taken away, and with it a rounding.
        return multiply_add(place, cells / 2, (n0 - 1) / 2, most=n0)
    scale = _scale(n, n0, spec)
    if spec.align_corners:
        return scale * position
    if spec.interpolation == "linear":  # PyTorch's kernel for lines rounds product and sum apart
        return scale * (position + 0.5) - 0.5
    return multiply_add(scale, position + 0.5, -0.5, most=n0)


def divide(a: Tensor | int, n: Tensor) -> Tensor:
    """``a / n`` in float32, rounded once.

    Also where a runtime computes ``a * (1 / n)``, which rounds twice (OpenVINO): what is missing
    is added. A right quotient keeps all its digits: the products of its three parts are exact.

    Args:
        a: at most 2,048, as on axes of up to 1,024 cells. Beyond it the quotient may be rounded
            twice.
        n: with a fraction, the quotient is what the runtime computes.
    """
    quotient = a / n
    below = quotient % 2**-11
    lowest = quotient % 2**-22
    missing = a - (quotient - below) * n - (below - lowest) * n - lowest * n
    # Of a quotient by a fraction the products cannot tell what is missing.
    return quotient + torch.where(n == n.floor(), missing / n, 0)


def multiply_add(a: Tensor, b: Tensor | float, c: Tensor | float, most: int) -> Tensor:
    """``a * b + c`` in float32, rounded once, as the fused multiply-add of PyTorch's kernels does.

    ``a`` is split in two (Dekker 1971): the products of ``b`` with the upper digits, and their sum
    with ``c``, are exact. The split is at a power of two, so that it stays exact wherever a
    compiler fuses operations.

    Args:
        b: multiples of 1/2.
        c: a multiple of 1/2.
        most: the largest ``abs(a * b)``. Beyond it the sum may be rounded twice.
    """
    unit = 2.0 ** (math.ceil(math.log2(most)) - 22)
    lower = a % unit
    return ((a - lower) * b + c) + lower * b
