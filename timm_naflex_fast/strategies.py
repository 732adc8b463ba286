"""The strategies: functions that compute the embeddings of grids from tables.

- ``interpolate_cached``: timm's own ``F.interpolate`` calls, once for each distinct grid. On a CPU
  its forward pass is bit-identical to timm's: the same calls on the same tensors. It gains in the
  backward pass. timm adds into slices of ``x``, and for each slice autograd copies the whole
  gradient.
- ``matmul``: timm's result as sums of the few table rows that each cell reads.
- ``grid_sample``: the result of timm's ``pos_embed_use_grid_sample``, by the same sums, with
  weights that are read off ``F.grid_sample`` at timm's positions.

The gradient needs no strategy: the transposed sums of ``resampling/sparse.py`` serve all learned
tables, and ``dense.factorized_gradients`` all factorized ones.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .names import StrategyName
from .resampling import dense, sparse
from .resampling.dense import Embeddings
from .resampling.matrices import interpolate
from .resampling.spec import ResizeSpec, Size

Tables = tuple[Tensor, ...]
"""One learned table ([1,] H0, W0, C), or the two of a factorized embedding.

These are ([1,] H0, C) and ([1,] W0, C).
"""


@dataclass(eq=False)
class Strategy:
    """One way to resample position tables. It has no state.

    ``resample(tables, sizes, spec, dtype, token_dtype)`` gives each size with the embeddings
    (h*w, C) of its grid; one at a time, if possible. Those of one table are in ``dtype``, or the
    table itself; those of two are cast to ``token_dtype`` before they are added. Only the eager
    backend calls it, also inside the compiled operator. The traceable backend computes the result
    of ``reference`` in its own form.

    Args:
        name: as in ``names.STRATEGY_NAMES``.
        resample: see above.
        reference: whose result it gives: "interpolate", that of ``F.interpolate``, or
            "grid_sample", that of timm's ``pos_embed_use_grid_sample``, which is for NaFlex batches
            alone.
        is_differentiable: ``resample`` consists of PyTorch's own differentiable operators, in
            float32: it runs on any device, and autograd derives it there.
        resizes_square: with ``ar_preserving`` it computes all of (L, L), not the first (h, w)
            alone.
        for_grid_sample: the strategy that a model made with ``pos_embed_use_grid_sample`` takes
            when this one is chosen; None: timm's own code.
    """

    name: str
    resample: Callable[[Tables, Iterable[Size], ResizeSpec, torch.dtype, torch.dtype], Embeddings]
    reference: str = "interpolate"
    is_differentiable: bool = False
    resizes_square: bool = False
    for_grid_sample: StrategyName | None = None

    def spec(
        self, interpolation: str, antialias: bool, align_corners: bool, ar_preserving: bool
    ) -> ResizeSpec:
        """How it resizes, in the words of ``ResizeSpec``."""
        return ResizeSpec(interpolation, antialias, align_corners, ar_preserving, self.reference)


def by_sums(
    tables: Tables,
    sizes: Iterable[Size],
    spec: ResizeSpec,
    dtype: torch.dtype,
    token_dtype: torch.dtype,
) -> Embeddings:
    """Sparse sums of one table; thin products of two."""
    if len(tables) == 2:
        return dense.resample_factorized(tables, sizes, spec, token_dtype)
    return sparse.resample(tables[0], sizes, spec, dtype)


def by_interpolate(
    tables: Tables,
    sizes: Iterable[Size],
    spec: ResizeSpec,
    dtype: torch.dtype,
    token_dtype: torch.dtype,
) -> Embeddings:
    """timm's own calls of ``F.interpolate``, in float32 whatever ``dtype`` is."""
    for size in sizes:
        if len(tables) == 1:
            yield size, _interpolate_learned(tables[0], size, spec)
        else:
            yield size, _interpolate_factorized(tables, size, spec, token_dtype)


def _interpolate_learned(table: Tensor, size: Size, spec: ResizeSpec) -> Tensor:
    """The embeddings (h*w, C); those of the table's own size are the table itself."""
    h, w = size
    if table.shape[-3:-1] == size:
        return table.reshape(h * w, -1)
    resized = interpolate(table, spec.resized_size(h, w), spec)
    if spec.ar_preserving:
        resized = resized[:, :h, :w]
    return resized.reshape(h * w, -1)


def _interpolate_factorized(
    tables: Tables, size: Size, spec: ResizeSpec, token_dtype: torch.dtype
) -> Tensor:
    """The embeddings (h*w, C): the sum of two lines."""
    lines = []
    for table, keep, length in zip(tables, size, spec.resized_size(*size)):
        line = table if table.shape[-2] == length else interpolate(table, (length,), spec)
        lines.append(line.flatten(0, -2)[:keep].to(token_dtype))
    y, x = lines  # (h, C), (w, C)
    return (y[:, None] + x).flatten(0, 1)


_ALL = (
    Strategy("interpolate_cached", by_interpolate, is_differentiable=True, resizes_square=True),
    Strategy("grid_sample", by_sums, reference="grid_sample", for_grid_sample="grid_sample"),
    Strategy("matmul", by_sums, for_grid_sample="grid_sample"),
)
STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in _ALL}
