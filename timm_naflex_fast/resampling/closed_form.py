"""Resize weights in closed form, from tensors of coordinates and lengths: what a graph can hold.

``resampling/matrices.py`` reads PyTorch's weights off ``F.interpolate``, whose sizes the host must
know. This file computes the same weights on the device of the coordinates. Scale and centre are
rounded to float32 exactly as PyTorch rounds them (at a table of 128 cells that rounding alone moves
a weight by 8e-6); the filter itself is evaluated in float64. The cubic kernel is that of Keys
(1981, "Cubic convolution interpolation for digital image processing").
"""

import torch
from torch import Tensor

from .spec import ResizeSpec


def axis_weights(position: Tensor, n: Tensor, n0: int, spec: ResizeSpec) -> Tensor:
    """Row ``position`` of the matrix that resizes ``n0`` cells to ``n``: (..., n0) float64.

    Args:
        position: any shape. A whole number, 0 <= position < n; with timm's grid_sample flag any;
            NaN is NaN.
        n: the cells to which the axis is resized; numbers that broadcast with ``position``.
        n0: cells of the table on this axis.
        spec: its interpolation, antialias, align_corners and reference.
    """
    if spec.antialias:
        return _antialiased_weights(position, n, n0, spec)
    taps, values = tap_weights(position, n, n0, spec)  # (..., taps)
    cells = torch.arange(n0, device=taps.device)
    return (values[..., None] * (cells == taps[..., None])).sum(-2)


def _antialiased_weights(position: Tensor, n: Tensor, n0: int, spec: ResizeSpec) -> Tensor:
    """:func:`axis_weights` with antialiasing."""
    # The filter is stretched where the table shrinks.
    centre, scale = _centre(position, n, n0, spec)
    cells = torch.arange(n0, device=centre.device, dtype=torch.float64)
    distance = (cells - centre[..., None] + 0.5).abs() / scale[..., None].clamp(min=1)
    if spec.interpolation == "bilinear":
        weights = (1 - distance).clamp(min=0)
    else:
        weights = cubic_kernel(distance, -0.5)
    # Taps outside the table are dropped, and the rest renormalised.
    return weights / weights.sum(-1, keepdim=True)


def tap_weights(position: Tensor, n: Tensor, n0: int, spec: ResizeSpec) -> tuple[Tensor, Tensor]:
    """The table cells that a position reads without antialiasing, and their weights.

    Both are (..., 2), bicubic (..., 4). Taps beyond the table are moved to its border, as PyTorch
    does, so a cell may be named twice.
    """
    centre, _ = _centre(position, n, n0, spec)
    if spec.interpolation == "bicubic":
        first = centre.floor()
        near = torch.arange(-1, 3, device=centre.device)
        weights = cubic_kernel(((centre - first)[..., None] - near).abs(), -0.75)
    else:
        centre = centre.clamp(0, n0 - 1)
        first = centre.floor()
        near = torch.arange(2, device=centre.device)
        weights = 1 - ((centre - first)[..., None] - near).abs()
    taps = (first[..., None] + near).clamp(0, n0 - 1)
    return taps.masked_fill(taps.isnan(), 0).long(), weights


def _centre(position: Tensor, n: Tensor, n0: int, spec: ResizeSpec) -> tuple[Tensor, Tensor]:
    """Where a position lies on the table's axis, and table cells per position.

    Both are float32 values held in float64.
    """
    position = position.to(torch.float32)
    n = n.to(torch.float32)
    if spec.use_grid_sample:
        return _sampled_centre(position, n, n0, spec).double(), n.double()
    if spec.align_corners:
        scale = torch.full_like(n, n0 - 1) / (n - 1).clamp(min=1) * (n > 1)
    else:
        scale = torch.full_like(n, n0) / n  # not n0 / n, which PyTorch rounds twice

    # PyTorch rounds each of these in its own order. With antialiasing, ``align_corners`` changes
    # the scale and nothing else.
    if spec.antialias:
        centre = scale * (position + 0.5)
    elif spec.align_corners:
        centre = scale * position
    elif spec.interpolation == "linear":
        centre = scale * (position + 0.5) - 0.5
    else:
        centre = _fused(scale, position.double() + 0.5, -0.5)
    return centre.double(), scale.double()


def _sampled_centre(position: Tensor, n: Tensor, n0: int, spec: ResizeSpec) -> Tensor:
    """The same as timm's grid_sample flag: ``F.grid_sample`` takes positions in [-1, 1]."""
    if spec.align_corners:
        position = 2 * position / (n - 1).clamp(min=1) - 1
        return (position + 1) * ((n0 - 1) / 2)
    if spec.reference == "affine_grid":
        position = _affine_position(position, n)
    else:
        position = (2 * position + 1) / n - 1
    return _fused(position + 1, n0 / 2, -0.5)


def _affine_position(cell: Tensor, n: Tensor) -> Tensor:
    """Where a cell lies in [-1, 1] by older timm's affine grid, as long as the batch's longest."""
    longest = n.amax(0)
    cell = cell + longest * (cell < 0)  # timm's index -1 is the last one
    # torch.linspace(-1, 1, longest), which counts from both ends.
    step = 2 / (longest - 1).clamp(min=1)
    from_left = _fused(step, cell, -1)
    from_right = _fused(-step, longest - 1 - cell, 1)
    line = torch.where(2 * cell + 1 < longest, from_left, from_right)
    # F.affine_grid moves it to the centres of cells, and ``theta`` takes the sample's part of it.
    even = line * (longest - 1) / longest
    zoom = longest / n
    return even * zoom + (zoom - 1)


def _fused(a: Tensor, b: Tensor | float, c: float) -> Tensor:
    """``a * b + c`` rounded once to float32, as by the fused multiply-adds of PyTorch's kernels."""
    return (a.double() * b + c).to(torch.float32)


def cubic_kernel(distance: Tensor, a: float) -> Tensor:
    """Keys' cubic convolution kernel with coefficient ``a``.

    It is -0.5 in PyTorch's antialiased bicubic, else -0.75.
    """
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = (((distance - 5) * distance + 8) * distance - 4) * a
    return torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))
