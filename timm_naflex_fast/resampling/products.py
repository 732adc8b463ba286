"""The adjoints of ``exact`` once more, as products of dense float64 matrices.

Slower, but made of operations that PyTorch can differentiate again and batch: for second derivatives and for
``is_grads_batched``. Float64 is touched neither by autocast nor by TF32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .grids import Group
from .matrices import Resampling, axis_matrix
from .tokens import Tokens, sum_plainly


def table_gradient(tokens: Tokens, table_shape: torch.Size, groups: list[Group], how: Resampling) -> Tensor:
    """The gradient (H0, W0, C) of a learned table from that of the tokens (B, N, C)."""
    device = tokens.in_grid[0].device
    grad = torch.zeros(table_shape, dtype=torch.float64, device=device)
    for group in groups:
        cells = sum_plainly(tokens, group)
        if how.sampler == "interpolate" and (group.h, group.w) == tuple(table_shape[:2]):
            grad = grad + cells.view(table_shape)
            continue
        a_h, a_w = (_matrix(axis, group, table_shape[axis], how, device) for axis in (0, 1))
        strip = (a_h.t() @ cells.view(group.h, -1)).view(len(grad), group.w, -1)
        grad = grad + torch.matmul(a_w.t(), strip)
    return grad


def line_gradients(
    tokens: Tokens, lengths: tuple[int, int], groups: list[Group], how: Resampling
) -> tuple[Tensor, ...]:
    """The gradients (H0, C) and (W0, C) of the tables of a factorized embedding."""
    first = tokens.in_grid[0]
    grads = [torch.zeros(n0, first.shape[-1], dtype=torch.float64, device=first.device) for n0 in lengths]
    for group in groups:
        cells = sum_plainly(tokens, group).view(group.h, group.w, -1)
        for axis, n0 in enumerate(lengths):
            line = cells.sum(1 - axis)
            same = how.sampler == "interpolate" and how.lengths(group.h, group.w)[axis] == n0
            eye = torch.eye(len(line), n0, dtype=torch.float64, device=first.device)
            grads[axis] = grads[axis] + (eye if same else _matrix(axis, group, n0, how, first.device)).t() @ line
    return tuple(grads)


def _matrix(axis: int, group: Group, n0: int, how: Resampling, device: torch.device) -> Tensor:
    return axis_matrix(axis, group.h, group.w, n0, how).to(device, torch.float64)
