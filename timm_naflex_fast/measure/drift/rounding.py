"""How far two results may lie apart, element by element, if nothing but rounding differs."""

from typing import Any

import torch
from torch import Tensor

from ...resampling.matrices import axis_matrix
from ...resampling.spec import ResizeSpec

FLOAT32 = 2e-6
"""What the sums in float32 may differ by, as a share of what they add up (absolute values)."""


def position_tables(embeds: Any) -> list[Tensor]:
    """The learned table (1, H0, W0, C) of a NaFlexEmbeds, or its two factorized ones."""
    tables = []
    for name, table in embeds.named_parameters():
        if name.startswith("pos_embed"):
            tables.append(table.detach())
    return tables


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
    sums = []
    for coord in patch_coord.long():
        h, w = (coord.amax(0) + 1).tolist()
        y, x = coord.unbind(-1)
        sums.append(_scale(embeds, tables, h, w)[y, x])
    scale = torch.stack(sums)  # (B, N, C)

    limits = torch.finfo(next(embeds.parameters()).dtype)
    embedding = (FLOAT32 + len(tables) * limits.eps) * scale
    token = limits.eps * tokens.abs()
    smallest = limits.tiny * limits.eps  # the last bit of a number near 0
    return embedding + token + smallest


def _scale(embeds: Any, tables: list[Tensor], h: int, w: int) -> Tensor:
    """The sums over absolute values (h, w, C) for one grid."""
    spec = ResizeSpec(
        embeds.pos_embed_interp_mode if len(tables) == 1 else "linear",
        # Older releases of timm lack these two settings.
        getattr(embeds, "pos_embed_antialias", True),
        getattr(embeds, "pos_embed_align_corners", False),
        embeds.pos_embed_ar_preserving,
        "grid_sample" if embeds.pos_embed_use_grid_sample else "interpolate",
    )
    height = tables[0].shape[1]
    width = tables[-1].shape[-2]
    rows = axis_matrix(0, (h, w), height, spec, torch.float64).abs()
    columns = axis_matrix(1, (h, w), width, spec, torch.float64).abs()
    if len(tables) == 1:
        return columns @ torch.tensordot(rows, tables[0][0], 1)
    y_table, x_table = tables  # (1, H0, C), (1, W0, C)
    return (rows @ y_table[0])[:, None] + columns @ x_table[0]
