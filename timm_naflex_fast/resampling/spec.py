"""How a library resizes its position table, and which of timm's methods the result follows.

``tests/contract/test_backends.py`` tests what follows from it.
"""

from typing import Literal, NamedTuple

INTERPOLATIONS = ("bilinear", "bicubic")  # those that are replaced
Size = tuple[int, int]

Reference = Literal["interpolate", "grid_sample", "affine_grid"]
"""A method of timm's whose result is followed. The last two sample the table at float32 positions,
by ``F.grid_sample``: they never antialias, resize a grid of the table's own size too, and embed
padding tokens."""

LOOP: Reference = "interpolate"
"""timm's loop over the grids, its default: ``NaFlexEmbeds._apply_learned_naflex_pos_embed``."""

FLAG: Reference = "grid_sample"
"""The method of its flag ``pos_embed_use_grid_sample``, ``_apply_learned_naflex_pos_embed_grid_sample``,
in newer releases."""

OLDER_FLAG: Reference = "affine_grid"
"""The same method in older releases, which take positions from ``F.affine_grid``: part of a grid as
long as the longest of the batch, which changes their rounding. In every release so does
``_apply_factorized_naflex_pos_embed_grid_sample``."""


class ResizeSpec(NamedTuple):
    """How a library resamples its position table. ``learned_spec`` and ``factorized_spec`` make it.

    Args:
        interpolation: ``"bilinear"`` or ``"bicubic"`` for a learned table (H0, W0, C), ``"linear"``
            for the two of a factorized one.
        antialias: widen the filter when the table is made smaller.
        align_corners: the outermost cells of table and grid coincide.
        ar_preserving: resize to (L, L), L = max(h, w), and keep the top-left (h, w).
        reference: whose result it is.
        embeds_padding: tokens after those of the grid get the cells that they name, too.
        batch_max: for ``OLDER_FLAG``, the largest height and width of the batch.
    """

    interpolation: str = "bicubic"
    antialias: bool = True
    align_corners: bool = False
    ar_preserving: bool = False
    reference: str = LOOP
    embeds_padding: bool = False
    batch_max: Size = (0, 0)

    # No property: the compiler of torch 2.4 cannot read one of a named tuple.
    def samples(self) -> bool:
        """Whether the reference is a method of timm's flag. It embeds padding tokens."""
        return self.reference != LOOP

    def own_size(self, table_size: Size) -> Size | None:
        """The grid whose embeddings are the table itself, not resized; None if there is none."""
        if self.samples():
            return None
        # timm resizes the lines of a factorized embedding to a square even so.
        if self.ar_preserving and self.interpolation == "linear":
            return None
        return table_size

    def resized_size(self, h: int, w: int) -> Size:
        """The size to which the table is resized for a grid (h, w), before the crop."""
        if not self.ar_preserving:
            return h, w
        longest = max(h, w)
        return longest, longest


def learned_spec(
    interpolation: str, antialias: bool, align_corners: bool, ar_preserving: bool, reference: str
) -> ResizeSpec:
    """How a learned table is resized by these options of a library."""
    # timm's flag has no filter to widen, whatever the model's setting for it says.
    widens = antialias and reference == LOOP
    return ResizeSpec(interpolation, widens, align_corners, ar_preserving, reference)


def factorized_spec(ar_preserving: bool, reference: str) -> ResizeSpec:
    """How the two tables of lines are resized, whatever the options of a learned table are."""
    # In every release timm takes the lines of its flag from an affine grid.
    of_lines = LOOP if reference == LOOP else OLDER_FLAG
    return ResizeSpec("linear", False, False, ar_preserving, of_lines)
