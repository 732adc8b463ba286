"""Resize weights in closed form, from coordinates and lengths that are tensors: what a graph can
hold.

``resampling/matrices.py`` reads PyTorch's weights off ``F.interpolate``, whose sizes the host must
know. This file computes the same weights on the device of the coordinates. Scale and centre are
rounded to float32 exactly as PyTorch rounds them (at a table of 128 cells that rounding alone moves
a weight by 8e-6); the filter itself is evaluated in float64. The cubic kernel is that of Keys
(1981, "Cubic convolution interpolation for digital image processing").
"""

import torch
from torch import Tensor

from .matrices import ResizeSpec


def axis_weights(position: Tensor, n: Tensor, n0: int, spec: ResizeSpec) -> Tensor:
    """Row ``position`` of the matrix that resizes an axis of ``n0`` cells to ``n``: (..., n0)
    float64.

    Args:
        position: any shape. A whole number, 0 <= position < n; with timm's grid_sample flag any;
            NaN is NaN.
        n: the cells to which the axis is resized; numbers that broadcast with ``position``.
        n0: cells of the table on this axis.
        spec: its interpolation, antialias, align_corners and reference.
    """
    centre, scale = _centre(position, n, n0, spec)
    cells = torch.arange(n0, device=centre.device, dtype=torch.float64)
    if spec.antialias:
        # The filter, stretched where the table shrinks; taps outside the table are dropped, the
        # rest renormalised.
        distance = (cells - centre[..., None] + 0.5).abs() / scale[..., None].clamp(min=1)
        weights = (
            (1 - distance).clamp(min=0)
            if spec.interpolation == "bilinear"
            else cubic_kernel(distance, -0.5)
        )
        return weights / weights.sum(-1, keepdim=True)
    taps, values = tap_weights(position, n, n0, spec)
    return (values[..., None] * (cells == taps[..., None])).sum(-2)


def tap_weights(position: Tensor, n: Tensor, n0: int, spec: ResizeSpec) -> tuple[Tensor, Tensor]:
    """Without antialiasing, the table cells a position reads and their weights: both (..., 2),
    bicubic (..., 4).

    Taps beyond the table are moved to its border, as PyTorch does, so a cell may be named twice.
    """
    centre, _ = _centre(position, n, n0, spec)
    bicubic = spec.interpolation == "bicubic"
    if not bicubic:
        centre = centre.clamp(0, n0 - 1)
    first = centre.floor()
    near = torch.arange(-bicubic, 2 + bicubic, device=centre.device)
    distance = ((centre - first)[..., None] - near).abs()
    weights = cubic_kernel(distance, -0.75) if bicubic else 1 - distance
    taps = (first[..., None] + near).clamp(0, n0 - 1)
    return taps.masked_fill(taps.isnan(), 0).long(), weights


def _centre(position: Tensor, n: Tensor, n0: int, spec: ResizeSpec) -> tuple[Tensor, Tensor]:
    """Where a position lies on the table's axis, and table cells per position: float32 values held
    in float64."""
    position, n = position.to(torch.float32), n.to(torch.float32)
    if spec.reference != "interpolate":
        return _sampled_centre(position, n, n0, spec).double(), n.double()
    if spec.align_corners:
        scale = torch.full_like(n, n0 - 1) / (n - 1).clamp(min=1) * (n > 1)
    else:
        scale = torch.full_like(n, n0) / n  # not n0 / n, which PyTorch rounds twice
    if spec.antialias:  # with align_corners PyTorch changes the scale here and nothing else
        return (scale * (position + 0.5)).double(), scale.double()
    if spec.align_corners:
        return (scale * position).double(), scale.double()
    if spec.interpolation == "linear":
        return (scale * (position + 0.5) - 0.5).double(), scale.double()
    return _fused(scale, position.double() + 0.5, -0.5).double(), scale.double()


def _sampled_centre(position: Tensor, n: Tensor, n0: int, spec: ResizeSpec) -> Tensor:
    """The same as timm's grid_sample flag: a position in [-1, 1], which ``F.grid_sample`` takes to
    table cells."""
    if spec.align_corners:
        position = 2 * position / (n - 1).clamp(min=1) - 1
        return (position + 1) * ((n0 - 1) / 2)
    if (
        spec.reference == "affine_grid"
    ):  # torch.linspace(-1, 1, longest) from both ends, then the grid's part of it
        longest = n.amax(0)  # of the batch
        position = position + longest * (position < 0)  # timm's index -1 is the last one
        zoom, step = longest / n, 2 / (longest - 1).clamp(min=1)
        left, right = _fused(step, position, -1), _fused(-step, longest - 1 - position, 1)
        even = torch.where(2 * position + 1 < longest, left, right) * (longest - 1) / longest
        position = even * zoom + (zoom - 1)
    else:
        position = (2 * position + 1) / n - 1
    return _fused(position + 1, n0 / 2, -0.5)


def _fused(a: Tensor, b: Tensor | float, c: float) -> Tensor:
    """``a * b + c`` rounded once to float32, as PyTorch's two-dimensional kernels do it by fused
    multiply-adds."""
    return (a.double() * b + c).to(torch.float32)


def cubic_kernel(distance: Tensor, a: float) -> Tensor:
    """Keys' cubic convolution kernel with coefficient ``a``: -0.5 in PyTorch's antialiased bicubic,
    else -0.75."""
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = (((distance - 5) * distance + 8) * distance - 4) * a
    return torch.where(distance < 1, near, torch.where(distance < 2, far, torch.zeros_like(far)))
