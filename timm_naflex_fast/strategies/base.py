"""What a strategy is: a function that computes the embeddings of grids from tables, and what is to
know of it.

The gradient needs no strategy: the transposed sums of ``resampling/sparse.py`` serve all that give
one result.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..batch.grids import ResamplePlan
from ..resampling.dense import GroupEmbeddings
from ..resampling.matrices import ResizeSpec

Tables = tuple[Tensor, ...]
"""One learned table ([1,] H0, W0, C), or the two of a factorized embedding, ([1,] H0, C) and ([1,]
W0, C)."""


@dataclass(eq=False)
class Strategy:
    """One way to resample position tables. It has no state; what is kept is in
    ``resampling/kept.py``.

    Only the eager backend calls ``resample``. The other backends compute the result of
    ``reference`` in their own form.

    Args:
        resample: gives each group with the embeddings (h*w, C) of its grid; one at a time, if
            possible.
        reference: whose result it gives: "interpolate", that of ``F.interpolate``, or
            "grid_sample", that of timm's ``pos_embed_use_grid_sample``, which is for NaFlex batches
            alone.
        breaks_graph: it has no operator, so ``torch.compile`` breaks the graph, and no CUDA graph
            can hold it. Where operations are recorded for export, the traceable backend computes
            instead.
        resizes_square: with ``ar_preserving`` it computes all of (L, L), not the first (h, w)
            alone.
        for_grid_sample: the strategy that a model made with ``pos_embed_use_grid_sample`` takes
            when this one is chosen; None: timm's own code.
    """

    resample: Callable[[Tables, ResamplePlan], GroupEmbeddings]
    reference: str = "interpolate"
    breaks_graph: bool = False
    resizes_square: bool = False
    for_grid_sample: str | None = None

    def spec(
        self, interpolation: str, antialias: bool, align_corners: bool, ar_preserving: bool
    ) -> ResizeSpec:
        """How it resizes, in the words of ``ResizeSpec``."""
        return ResizeSpec(interpolation, antialias, align_corners, ar_preserving, self.reference)
