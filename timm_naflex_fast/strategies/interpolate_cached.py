"""``interpolate_cached``: timm's own ``F.interpolate`` calls, once for each distinct grid.

On a CPU its forward pass is bit-identical to timm's: the same calls on the same tensors. It gains in the backward pass.
timm adds into slices of ``x``, and for each slice autograd copies the whole gradient; here the gradient of a grid's
embeddings is summed over its samples, in float32 at least, and the transposed sums of ``matmul`` take it to the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ..resampling.grids import GridGroup, ResamplePlan
from .base import Strategy, Tables


def resample(tables: Tables, plan: ResamplePlan) -> Iterator[tuple[GridGroup, Tensor]]:
    """Each group with its embeddings; if the sizes match, they are the table itself, not converted.

    ``plan.dtype`` is not looked at: timm computes in float32.
    """
    spec = plan.spec
    options = dict(mode=spec.interpolation, align_corners=spec.align_corners, antialias=spec.antialias)
    for group in plan.groups:
        h, w = group.h, group.w
        lengths = spec.lengths(h, w)
        if len(tables) == 1:
            yield group, _resized(tables[0], (h, w), lengths, **options)[:h, :w].flatten(0, 1)
        else:
            y, x = (_resized(table, (n,), (n,), mode="linear") for table, n in zip(tables, lengths))
            y, x = y[:h].to(plan.token_dtype), x[:w].to(plan.token_dtype)  # (h, C), (w, C)
            yield group, (y[:, None] + x[None]).flatten(0, 1)


def _resized(table: Tensor, size: tuple[int, ...], lengths: tuple[int, ...], **options: Any) -> Tensor:
    """A table (..., C) resized to ``lengths``, as timm does it; the table itself if it has the ``size`` of the grid."""
    if size == tuple(table.shape[:-1]):
        return table
    # Cell after cell in memory, whatever the table's own layout is: resized with antialiasing to a width of 1, every
    # other layout gives wrong numbers (PyTorch 2.4 to 2.15). So does a single channel, which has no layout; two have.
    channels = table.shape[-1]
    if channels == 1 and lengths[1:] == (1,):
        table = table.expand(-1, -1, 2)  # pragma: no mutate: any number above 1
    images = table.float().contiguous().unsqueeze(0).movedim(-1, 1)  # (1, C, H0, W0)
    return F.interpolate(images, size=lengths, **options)[0].movedim(0, -1)[..., :channels]


STRATEGY = Strategy(resample, needs_host=True, resizes_square=True)
