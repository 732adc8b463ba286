"""What a strategy is: a linear map from tables to the embeddings of grids, its transpose, and a few facts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..resampling.dense_resize import Embeddings
from ..resampling.grids import GridGroup
from ..resampling.matrices import ResizeSpec
from ..resampling.tokens import Tokens

Tables = tuple[Tensor, ...]
"""One learned table (H0, W0, C), or the two of a factorized embedding, (H0, C) and (W0, C)."""


class Strategy(ABC):
    """One way to resample position tables. It keeps nothing from call to call."""

    needs_host = False
    """Only the eager backend runs it: it must know the grids on the host."""
    whole_square = False
    """With ``ar_preserving`` it computes all of (L, L), not the first (h, w) alone."""
    sampler = "interpolate"
    """Whose positions it takes: those of timm's default, or "grid_sample", those of its ``pos_embed_use_grid_sample``,
    which is for NaFlex batches alone."""
    for_grid_sample: str | None = None
    """The strategy that a model made with ``pos_embed_use_grid_sample`` takes when this one is chosen; None: timm's."""

    @abstractmethod
    def resample(
        self, tables: Tables, groups: list[GridGroup], spec: ResizeSpec, token_dtype: torch.dtype, dtype: torch.dtype
    ) -> Embeddings:
        """Each group with the embeddings (h*w, C) of its grid, summed in ``dtype``; one at a time, if possible."""

    def inputs(self, tables: Tables, embeddings: Embeddings) -> tuple[Sequence[Tensor], Embeddings]:
        """The tensors whose gradients ``transpose`` gives, from where autograd goes on; and the embeddings again."""
        return tables, embeddings

    @abstractmethod
    def transpose(
        self,
        tokens: Tokens,
        shapes: Sequence[Sequence[int]],
        groups: list[GridGroup],
        spec: ResizeSpec,
        dtype: torch.dtype,
    ) -> Iterable[Tensor]:
        """The gradients of the inputs, which have these ``shapes``, from that of the tokens; they own their memory."""

    @abstractmethod
    def differentiable(self, inputs: Sequence[Tensor], groups: list[GridGroup], spec: ResizeSpec) -> Embeddings:
        """As ``resample``, from the inputs, by operations that PyTorch can differentiate and batch."""

    def worth_keeping(self, tables: Tables, groups: list[GridGroup]) -> bool:
        """Whether comparing the bits of the tables costs less than resampling them again."""
        return True
