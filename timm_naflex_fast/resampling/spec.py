"""How a library resizes its position table, and which of timm's methods the result follows.

``tests/contract/test_backends.py`` tests what follows from it.
"""

from typing import Literal, NamedTuple

INTERPOLATIONS = ("bilinear", "bicubic")  # those that are replaced
Size = tuple[int, int]

Reference = Literal["interpolate", "grid_sample"]
"""A method of timm's whose result is followed."""

LOOP: Reference = "interpolate"
"""timm's loop over the grids, its default: ``NaFlexEmbeds._apply_learned_naflex_pos_embed``."""

FLAG: Reference = "grid_sample"
"""That of its flag ``pos_embed_use_grid_sample``: it samples the learned table at float32 positions, by
``F.grid_sample``, never antialiases, resizes a grid of the table's own size too, and embeds padding
tokens."""


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
    """

    interpolation: str = "bicubic"
    antialias: bool = True
    align_corners: bool = False
    ar_preserving: bool = False
    reference: str = LOOP
    embeds_padding: bool = False

    # No property: the compiler of torch 2.4 cannot read one of a named tuple.
    def samples(self) -> bool:
        """Whether the reference is a method of timm's flag. It embeds padding tokens."""
        return self.reference != LOOP

    def own_size(self, table_size: Size) -> Size | None:
        """The grid whose embeddings are the table itself, not resized; None if there is none."""
        # timm resizes the lines of a factorized embedding to a square even so.
        is_square = self.ar_preserving and self.interpolation == "linear"
        return None if is_square or self.reference != LOOP else table_size

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
    is_flag = reference != LOOP
    widens = antialias and not is_flag
    return ResizeSpec(interpolation, widens, align_corners, ar_preserving, reference, is_flag)


def factorized_spec(ar_preserving: bool) -> ResizeSpec:
    """How the two tables of lines are resized, whatever the options of a learned table are."""
    return ResizeSpec("linear", False, False, ar_preserving)
