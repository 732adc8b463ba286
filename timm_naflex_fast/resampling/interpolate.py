"""The interpolate_cached strategy: timm's own ``F.interpolate`` calls, once for each distinct grid.

On a CPU its forward pass is bit-identical to timm's: the same calls on the same tensors. It gains in the backward pass.
timm adds into slices of ``x``, and for each slice autograd copies the whole gradient; here the gradient of a grid's
cells is summed over its samples, in float32 at least, and then goes through ``F.interpolate`` once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .grids import Group
from .matrices import Resampling


def resample(
    tables: tuple[Tensor, ...], groups: list[Group], how: Resampling, token_dtype: torch.dtype, dtype: torch.dtype
) -> Iterator[tuple[Group, Tensor]]:
    """Each group with its cells (h*w, C): of one table (H0, W0, C), or the sum ``y + x`` of two, (H0, C) and (W0, C).

    PyTorch can differentiate them in the tables. If the sizes match, they are the table itself, not converted.
    ``dtype`` is not looked at: timm computes in float32.
    """
    for group in groups:
        h, w = group.h, group.w
        if len(tables) == 1:
            yield group, _resized(tables[0], (h, w), how)
        else:
            y, x = (_resized_line(table, n).to(token_dtype) for table, n in zip(tables, how.lengths(h, w)))
            yield group, (y[:h, None] + x[None, :w]).flatten(0, 1)


def _resized(table: Tensor, size: tuple[int, int], how: Resampling) -> Tensor:
    h, w = size
    if size == tuple(table.shape[:2]):
        return table.reshape(h * w, -1)
    resized = F.interpolate(
        table[None].permute(0, 3, 1, 2).float(),
        size=how.lengths(h, w),
        mode=how.mode,
        align_corners=how.align_corners,
        antialias=how.antialias,
    )
    return resized[0, :, :h, :w].flatten(1).t()


def _resized_line(table: Tensor, n: int) -> Tensor:
    if n == len(table):
        return table
    return F.interpolate(table[None].permute(0, 2, 1).float(), size=n, mode="linear").permute(0, 2, 1)[0]
