"""How far two results may lie apart, element by element, if nothing but rounding differs."""

from typing import Any

import torch
from torch import Tensor

from ...resampling.matrices import ResizeSpec, axis_matrix

FLOAT32 = 2e-6
"""What the sums in float32 may differ by, as a share of what they add up (absolute values)."""


def position_tables(embeds: Any) -> list[Tensor]:
    """The learned table (1, H0, W0, C) of a NaFlexEmbeds, or its two factorized ones."""
    return [
        table.detach() for name, table in embeds.named_parameters() if name.startswith("pos_embed")
    ]


def rounding(embeds: Any, patch_coord: Tensor, tokens: Tensor) -> Tensor:
    """The largest difference that is rounding, for each element of timm's embedded tokens.

    An element's position embedding is a weighted sum over some cells of the table. Its scale is
    that sum over absolute values, so a large value elsewhere excuses nothing here. Allowed are
    ``FLOAT32`` of the scale, and the last bit of the model's dtype for the embedding (for each of
    two factorized ones) and for the token.

    Args:
        embeds: a NaFlexEmbeds; its dtype is the model's.
        patch_coord: (B, N, 2) coordinates (y, x).
        tokens: (B, N, C) float64.

    Returns:
        (B, N, C) float64, above 0.
    """
    tables = [table.abs().double() for table in position_tables(embeds)]
    limits = torch.finfo(next(embeds.parameters()).dtype)
    scale = torch.zeros_like(tokens)
    grids = patch_coord.amax(1).long() + 1
    y, x = patch_coord.long().unbind(-1)
    for grid in grids.unique(dim=0):
        members = (grids == grid).all(1).nonzero()[:, 0]
        scale[members] = _scale(embeds, tables, *grid.tolist())[y[members], x[members]]
    return (
        (FLOAT32 + len(tables) * limits.eps) * scale
        + limits.eps * tokens.abs()
        + limits.tiny * limits.eps
    )


def _scale(embeds: Any, tables: list[Tensor], h: int, w: int) -> Tensor:
    """The sums over absolute values (h, w, C) for one grid."""
    learned, sampled = len(tables) == 1, getattr(embeds, "pos_embed_use_grid_sample", False)
    spec = ResizeSpec(
        embeds.pos_embed_interp_mode if learned else "linear",
        antialias=getattr(embeds, "pos_embed_antialias", True) and not sampled,
        align_corners=getattr(embeds, "pos_embed_align_corners", False) and not sampled,
        ar_preserving=embeds.pos_embed_ar_preserving,
    )
    old = tables[0].shape[1:3] if learned else (tables[0].shape[1], tables[1].shape[1])
    rows, columns = (
        axis_matrix(axis, (h, w), n0, spec, torch.float64).abs() for axis, n0 in enumerate(old)
    )
    if not learned:
        return (rows @ tables[0][0])[:, None] + columns @ tables[1][0]
    return columns @ torch.tensordot(rows, tables[0][0], 1)
