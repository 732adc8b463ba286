"""How far two results may lie apart, element by element, if nothing but rounding differs."""

from typing import Any

import torch
from torch import Tensor

from ...batch.layout import Coordinates
from ...patching.timm import resize_spec, tables_of
from ...resampling.matrices import axis_matrix
from ...resampling.spec import ResizeSpec
from ...resampling.tables import Tables

FLOAT32 = 2e-6
"""What the sums in float32 may differ by, as a share of what they add up (absolute values)."""


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
    tables = tables_of(embeds)
    if tables is None:
        raise ValueError("the model has no position table")
    # Absolute values in place of the table's, and of the weights.
    absolute = type(tables)(tuple(t.detach().abs().double() for t in tables.without_leading_1))
    spec = resize_spec(embeds, tables, by_flag=embeds.pos_embed_use_grid_sample)
    # Read off the batch: some references round by its longest grid.
    spec = Coordinates(patch_coord).plan(tokens, spec).how.spec
    sums = []
    for coord in patch_coord.long():
        h, w = (coord.amax(0) + 1).tolist()
        y, x = coord.unbind(-1)
        sums.append(_scale(absolute, spec, h, w)[y, x])
    scale = torch.stack(sums)  # (B, N, C)

    limits = torch.finfo(next(embeds.parameters()).dtype)
    embedding = (FLOAT32 + len(tables.tensors) * limits.eps) * scale
    token = limits.eps * tokens.abs()
    smallest = limits.tiny * limits.eps  # the last bit of a number near 0
    return embedding + token + smallest


def _scale(absolute: Tables, spec: ResizeSpec, h: int, w: int) -> Tensor:
    """The sums over absolute values (h, w, C) for one grid."""
    h0, w0 = absolute.size
    rows = axis_matrix(0, (h, w), h0, spec, torch.float64).abs()
    columns = axis_matrix(1, (h, w), w0, spec, torch.float64).abs()
    return absolute.by_matrices(rows, columns, torch.float64).unflatten(0, (h, w))
