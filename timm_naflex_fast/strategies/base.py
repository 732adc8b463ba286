"""What a strategy is: a linear map from tables to the embeddings of grids, its transpose, and a few facts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor

from ..resampling.dense_resize import Embeddings
from ..resampling.grids import Batch, GridGroup
from ..resampling.tokens import Tokens

Tables = tuple[Tensor, ...]
"""One learned table (H0, W0, C), or the two of a factorized embedding, (H0, C) and (W0, C)."""


class Strategy(ABC):
    """One way to resample position tables. The object has no state; what is kept is in ``resampling/cache.py``.

    Only the eager backend calls these methods. The other backends compute the result of ``sampler`` in their own form,
    for every strategy: a strategy whose result is another needs a new ``sampler`` there.
    """

    needs_host = False
    """No other backend may stand in for it: a compiled graph breaks. (Exported code takes ``traceable``.)"""
    whole_square = False
    """With ``ar_preserving`` it computes all of (L, L), not the first (h, w) alone."""
    sampler = "interpolate"
    """Whose result it gives: "interpolate", that of ``F.interpolate``, or "grid_sample", that of timm's
    ``pos_embed_use_grid_sample``, which is for NaFlex batches alone."""
    for_grid_sample: str | None = None
    """The strategy that a model made with ``pos_embed_use_grid_sample`` takes when this one is chosen; None: timm's."""

    @abstractmethod
    def resample(self, tables: Tables, batch: Batch) -> Embeddings:
        """Each group with the embeddings (h*w, C) of its grid; one at a time, if possible."""

    def inputs(self, tables: Tables, embeddings: Embeddings) -> tuple[Sequence[Tensor], Embeddings]:
        """The tensors whose gradients ``transpose`` returns (autograd continues from them), and the embeddings.

        By default the tables; a strategy may give the embeddings themselves.
        """
        return tables, embeddings

    @abstractmethod
    def transpose(self, tokens: Tokens, shapes: Sequence[Sequence[int]], batch: Batch) -> Iterable[Tensor]:
        """The gradients of the inputs, which have these ``shapes``, from that of the tokens; they own their memory."""

    @abstractmethod
    def differentiable(self, inputs: Sequence[Tensor], batch: Batch) -> Embeddings:
        """As ``resample``, from the inputs, by operations that PyTorch can differentiate and batch."""

    def worth_keeping(self, tables: Tables, groups: list[GridGroup]) -> bool:
        """Whether comparing the bits of the tables costs less than resampling them again."""
        return True
