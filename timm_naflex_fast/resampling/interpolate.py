"""The interpolate_cached strategy: timm's own ``F.interpolate`` calls, once for each distinct grid.

On a CPU its forward pass is bit-identical to timm's: the same calls on the same tensors. It gains in the backward pass.
timm adds into slices of ``x``, and for each slice autograd copies the whole gradient; here the gradient of a grid's
cells is summed over its samples, in float32 at least, and then goes through ``F.interpolate`` once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .grids import Group
from .matrices import ResizeSpec


def resample(
    tables: tuple[Tensor, ...], groups: list[Group], how: ResizeSpec, token_dtype: torch.dtype, dtype: torch.dtype
) -> Iterator[tuple[Group, Tensor]]:
    """Each group with its cells (h*w, C): of one table (H0, W0, C), or the sum ``y + x`` of two, (H0, C) and (W0, C).

    PyTorch can differentiate them in the tables. If the sizes match, they are the table itself, not converted.
    ``dtype`` is not looked at: timm computes in float32.
    """
    learned: dict[str, Any] = dict(mode=how.mode, align_corners=how.align_corners, antialias=how.antialias)
    for group in groups:
        h, w = group.h, group.w
        if len(tables) == 1:
            yield group, _resized(tables[0], (h, w), how.lengths(h, w), **learned)[:h, :w].flatten(0, 1)
        else:
            lengths = how.lengths(h, w)
            y, x = (_resized(table, (n,), (n,), mode="linear").to(token_dtype) for table, n in zip(tables, lengths))
            yield group, (y[:h, None] + x[None, :w]).flatten(0, 1)


def _resized(table: Tensor, size: tuple[int, ...], lengths: tuple[int, ...], **how: Any) -> Tensor:
    """A table (..., C) resized to ``lengths``, as timm does it; the table itself if it has the ``size`` of the grid."""
    if size == tuple(table.shape[:-1]):
        return table
    return F.interpolate(table[None].movedim(-1, 1).float(), size=lengths, **how)[0].movedim(0, -1)
