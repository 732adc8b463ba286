"""How a library resizes its position table, and which of timm's methods the result follows.

``tests/resampling/test_tables.py`` tests what it says, ``tests/contract`` what follows from it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

INTERPOLATIONS = ("bilinear", "bicubic")  # those that are replaced
Size = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Reference:
    """A method of timm's whose result is followed, by what its result depends on.

    Args:
        name: of the result, in operators and in ``repr``.
        embeds_padding: tokens after those of the grid get the embedding of the cell that they name.
        skips_own_size: a grid of a learned table's own size gets the table, not resized.
        antialiases: it can widen the filter where the table is made smaller.
        samples: it reads the table at float32 positions, by ``F.grid_sample``; if not, it resizes
            by ``F.interpolate``.
        rounds_by_batch: its positions are part of a grid as long as the longest of the batch, which
            changes their rounding.
    """

    name: str
    embeds_padding: bool
    skips_own_size: bool
    antialiases: bool
    samples: bool
    rounds_by_batch: bool

    def __repr__(self) -> str:
        return self.name


LOOP = Reference(
    "interpolate",
    embeds_padding=False,
    skips_own_size=True,
    antialiases=True,
    samples=False,
    rounds_by_batch=False,
)
"""timm's loop over the grids, its default: ``NaFlexEmbeds._apply_learned_naflex_pos_embed``."""

FLAG = Reference(
    "grid_sample",
    embeds_padding=True,
    skips_own_size=False,
    antialiases=False,
    samples=True,
    rounds_by_batch=False,
)
"""The method of its flag ``pos_embed_use_grid_sample``, ``_apply_learned_naflex_pos_embed_grid_sample``,
in newer releases."""

OLDER_FLAG = Reference(
    "affine_grid",
    embeds_padding=True,
    skips_own_size=False,
    antialiases=False,
    samples=True,
    rounds_by_batch=True,
)
"""The same method in older releases, which take positions from ``F.affine_grid``; and in every
release ``_apply_factorized_naflex_pos_embed_grid_sample``."""

REFERENCES = {reference.name: reference for reference in (LOOP, FLAG, OLDER_FLAG)}


class ResizeSpec(NamedTuple):
    """How a library resamples its position table. ``tables.py`` makes it for a kind of table.

    Args:
        interpolation: ``"bilinear"`` or ``"bicubic"`` for a learned table (H0, W0, C), ``"linear"``
            for the two of a factorized one.
        antialias: widen the filter when the table is made smaller; False for "linear", and where
            the reference does not antialias.
        align_corners: the outermost cells of table and grid coincide.
        ar_preserving: resize to (L, L), L = max(h, w), and keep the top-left (h, w).
        reference: whose result it is.
        batch_max: where the reference rounds by the batch, its largest height and width.
    """

    interpolation: str = "bicubic"
    antialias: bool = True
    align_corners: bool = False
    ar_preserving: bool = False
    reference: Reference = LOOP
    batch_max: Size = (0, 0)

    def takes_table_itself(self, grid: Size, table_size: tuple[int, ...]) -> bool:
        """Whether the embeddings of a grid are a learned table itself, because the sizes match."""
        return grid == table_size and self.reference.skips_own_size

    def resized_size(self, h: int, w: int) -> Size:
        """The size to which the table is resized for a grid (h, w), before the crop."""
        if not self.ar_preserving:
            return h, w
        longest = max(h, w)
        return longest, longest


class Resampling(NamedTuple):
    """All that a strategy needs besides the tables and the sizes.

    One learned table is resampled in ``dtype``; two are cast to ``token_dtype`` before they are
    added.
    """

    spec: ResizeSpec
    token_dtype: torch.dtype
    dtype: torch.dtype = torch.float32
