"""``interpolate_cached``: timm's own ``F.interpolate`` calls, once for each distinct grid.

On a CPU its forward pass is bit-identical to timm's: the same calls on the same tensors. It gains
in the backward pass. timm adds into slices of ``x``, and for each slice autograd copies the whole
gradient; here the gradient of a grid's embeddings is summed over its samples, in float32 at least,
and the transposed sums of ``matmul`` take it to the table.
"""

from collections.abc import Iterator

from torch import Tensor

from ..batch.grids import GridGroup, ResamplePlan
from ..resampling.matrices import interpolate
from .base import Strategy, Tables


def resample(tables: Tables, plan: ResamplePlan) -> Iterator[tuple[GridGroup, Tensor]]:
    """Each group with its embeddings; if the sizes match, they are the table itself, not converted.

    ``plan.dtype`` is not looked at: timm computes in float32.
    """
    spec = plan.spec
    for group in plan.groups:
        h, w = group.h, group.w
        lengths = spec.resized_size(h, w)
        if len(tables) == 1:
            (table,) = tables
            if table.shape[-3:-1] != (h, w):
                table = interpolate(table, lengths, spec)
                table = table if lengths == (h, w) else table[:, :h, :w]
            yield group, table.reshape(h * w, -1)
        else:
            y, x = (
                (
                    table if table.shape[-2] == length else interpolate(table, (length,), spec)
                ).flatten(0, -2)
                for table, length in zip(tables, lengths)
            )
            y, x = y[:h].to(plan.token_dtype), x[:w].to(plan.token_dtype)  # (h, C), (w, C)
            yield group, (y[:, None] + x).flatten(0, 1)


STRATEGY = Strategy(resample, breaks_graph=True, resizes_square=True)
