"""``matmul``: timm's result as sums of the few table rows that each cell reads, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ..resampling import dense_resize, sparse_resize
from ..resampling.dense_resize import Embeddings
from ..resampling.grids import Batch, GridGroup
from ..resampling.tokens import Tokens
from .base import Strategy, Tables


class SparseSums(Strategy):
    """The sparse sums of ``resampling/sparse_resize.py``, with the matrices of ``spec.sampler``."""

    for_grid_sample = "grid_sample"

    def resample(self, tables: Tables, batch: Batch) -> Embeddings:
        """One grid's embeddings are alive at a time."""
        if len(tables) == 1:
            return sparse_resize.resample_learned(tables[0], batch)
        return sparse_resize.resample_factorized(tables, batch)

    def transpose(self, tokens: Tokens, shapes: Sequence[Sequence[int]], batch: Batch) -> Iterable[Tensor]:
        """The tables' gradients, by the transposed sums."""
        if len(shapes) == 1:
            return [sparse_resize.learned_gradient(tokens, shapes[0], batch)]
        return sparse_resize.factorized_gradients(tokens, [n0 for n0, _ in shapes], batch)

    def differentiable(self, inputs: Sequence[Tensor], batch: Batch) -> Embeddings:
        """As products of dense matrices."""
        return dense_resize.resample(inputs, batch.groups, batch.spec)

    def worth_keeping(self, tables: Tables, groups: list[GridGroup]) -> bool:
        """To compare costs two reads of each cell of a table; to sum, about eight reads of each cell of a grid."""
        if len(tables) == 2:
            return True
        of_grids = 0
        for group in groups:
            of_grids += group.h * group.w
        return tables[0].shape[0] * tables[0].shape[1] <= 4 * of_grids  # pragma: no mutate: times alone


STRATEGY = SparseSums()
