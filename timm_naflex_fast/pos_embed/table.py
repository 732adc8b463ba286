"""Position tables, and how a library resizes them.

A table is one of cells, or two of lines, timm's factorized embedding. Resizing takes means: the
weights of a row add up to 1. So the sum of two resized tables of lines is their sum
``Y[:, None] + X``, resized, and from :func:`whole` on there is one kind of table. For tokens of half
precision the sum is rounded once, where timm rounds each line and then their sum: the error (RMS) is
0.68 of timm's (30 cases, bfloat16 and float16).

Tests: tests/contract/test_backends.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

INTERPOLATIONS = ("bilinear", "bicubic")  # those that are replaced
Size = tuple[int, int]

PositionTable = tuple[Tensor, ...]
"""A learned table ([1,] H0, W0, C); or two, ([1,] H0, C) and ([1,] W0, C), whose lines are added."""


class ResizeSpec(NamedTuple):
    """How a library resizes its position table. ``learned_spec`` and ``factorized_spec`` make it.

    Args:
        interpolation: ``"bilinear"`` or ``"bicubic"`` for a learned table (H0, W0, C), ``"linear"``
            for the two of a factorized one.
        antialias: widen the filter when the table is made smaller.
        align_corners: the outermost cells of table and grid coincide.
        ar_preserving: resize to (L, L), L = max(h, w), and keep the top-left (h, w).
        samples: with the result of timm's flag pos_embed_use_grid_sample, which samples the table at
            float32 positions by ``F.grid_sample``: it never antialiases, resizes a grid of the
            table's own size too, and takes any coordinate. Otherwise with that of timm's loop.
        embeds_padding: tokens after those of the grid get the cells that they name, too.
    """

    interpolation: str = "bicubic"
    antialias: bool = True
    align_corners: bool = False
    ar_preserving: bool = False
    samples: bool = False
    embeds_padding: bool = False

    def own_size(self, table_size: Size) -> Size | None:
        """The grid whose embeddings are the table itself, not resized; None if there is none."""
        # timm resizes the lines of a factorized embedding to a square even so.
        is_square = self.ar_preserving and self.interpolation == "linear"
        return None if is_square or self.samples else table_size

    def resized_size(self, h: int, w: int) -> Size:
        """The size to which the table is resized for a grid (h, w), before the crop."""
        if not self.ar_preserving:
            return h, w
        longest = max(h, w)
        return longest, longest


def learned_spec(
    interpolation: str,
    antialias: bool,
    align_corners: bool,
    ar_preserving: bool,
    samples: bool,
    embeds_padding: bool,
) -> ResizeSpec:
    """How a learned table is resized by these options of a library."""
    # timm's flag has no filter to widen, whatever the model's setting for it says.
    widens = antialias and not samples
    return ResizeSpec(interpolation, widens, align_corners, ar_preserving, samples, embeds_padding)


def factorized_spec(ar_preserving: bool) -> ResizeSpec:
    """How the two tables of lines are resized, whatever the options of a learned table are."""
    return ResizeSpec("linear", False, False, ar_preserving)


def whole(table: PositionTable) -> Tensor:
    """One table (H0, W0, C): the learned one, or the sums of lines, in float32 at least."""
    if len(table) == 1:
        return table[0].flatten(0, -3)
    rows, columns = (lines.reshape(lines.shape[-2:]) for lines in table)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return rows.to(dtype)[:, None] + columns.to(dtype)
