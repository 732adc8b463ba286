"""The strategies: functions that compute the embeddings of grids from a table.

- ``interpolate_cached``: timm's own ``F.interpolate`` calls, once for each distinct grid. On a CPU
  its forward pass is bit-identical to timm's: the same calls on the same tensors. It gains in the
  backward pass. timm adds into slices of ``x``, and for each slice autograd copies the whole
  gradient.
- ``matmul``: timm's result as sums of the few table rows that each cell reads.
- ``grid_sample``: the result of timm's ``pos_embed_use_grid_sample``, by the same sums, with
  weights of ``F.grid_sample`` at timm's positions (``resampling/closed_form.py``).

The gradient needs no strategy: it is ``sparse.gradient``, one for all.

Tests: tests/contract/test_backends.py.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from .resampling import sparse
from .resampling.spec import FLAG, LOOP, Reference, ResizeSpec, Size
from .resampling.tables import Embeddings, PositionTable, interpolated


class Strategy(NamedTuple):
    """One way to resample position tables. It has no state.

    ``resample(table, sizes, spec, dtype)`` gives each size with the embeddings (h*w, C) of its grid,
    one at a time if possible, for tokens of ``dtype``, to which they are cast later. Only the eager
    backend calls it, also inside the compiled operator. The traceable backend computes the result
    of ``reference`` in its own form.

    Args:
        name: as in ``names.STRATEGY_NAMES``.
        resample: see above.
        reference: whose result it gives: that of timm's loop, or of ``pos_embed_use_grid_sample``,
            which is for NaFlex batches alone.
    """

    name: str
    resample: Callable[[PositionTable, Iterable[Size], ResizeSpec, torch.dtype], Embeddings]
    reference: Reference = LOOP


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("matmul", sparse.resample),
        Strategy("interpolate_cached", interpolated),
        Strategy("grid_sample", sparse.resample, reference=FLAG),
    )
}
