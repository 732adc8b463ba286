"""Embeddings of tokens from where each lies on its grid: the sums of ``closed_form``'s weights.

Positions and sizes are tensors, so that a graph can compute all this for grids that it does not
know. ``resampling/precision.py`` says in which dtype products are, because a graph cannot know
under which autocast and TF32 flags it will run.

``tests/backends/test_traceable.py`` compares it with the eager sums and with timm.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .closed_form import axis_weights, tap_weights
from .precision import unrounded_dtype, unrounded_product
from .spec import ResizeSpec


class TokenPositions(NamedTuple):
    """The grid (h, w) of each sample, or the size to which the table is resized for it, and where on
    it each token lies.

    A position is NaN where the host would raise an error; with timm's grid_sample flag only where
    a coordinate is not finite.
    """

    h: Tensor  # (B, 1) float32
    w: Tensor  # (B, 1) float32
    y: Tensor  # (B, N) float32
    x: Tensor  # (B, N) float32


def embeddings_at(table: Tensor, positions: TokenPositions, spec: ResizeSpec) -> Tensor:
    """The embeddings (B, N, C) of tokens from a table (H0, W0, C), in float32 at least."""
    positions = _resized(table, positions, spec)
    # Both give the same sums. Gathered taps read only the cells that have a weight, a product reads
    # every cell of the table for each token. On a CPU taps cost less from 128 rows on, bilinear
    # from 32 (measured).
    taps = 16 if spec.interpolation == "bicubic" else 4
    if not spec.antialias and 8 * taps <= table.shape[0]:
        return _gathered_taps(table, positions, spec)
    return _one_product(table, positions, spec)


def _resized(table: Tensor, positions: TokenPositions, spec: ResizeSpec) -> TokenPositions:
    """The same with the cells to which each axis is resized, before the crop, as h and w."""
    if not spec.ar_preserving:
        return positions
    h, w, y, x = positions
    h0, w0, _ = table.shape
    own_h, own_w = spec.own_size((h0, w0)) or (0, 0)  # which no grid has
    is_own = (h == own_h) & (w == own_w)
    longest = torch.maximum(h, w)
    return TokenPositions(torch.where(is_own, h, longest), torch.where(is_own, w, longest), y, x)


def _one_product(table: Tensor, positions: TokenPositions, spec: ResizeSpec) -> Tensor:
    """One product with a row of H0*W0 weights for each token: (B, N, C)."""
    h0, w0, _ = table.shape
    dtype = unrounded_dtype(table)
    y = axis_weights(positions.y, positions.h, h0, spec).to(dtype)  # (B, N, H0)
    x = axis_weights(positions.x, positions.w, w0, spec).to(dtype)  # (B, N, W0)
    # Resizing is separable: a cell's weight is its row's times its column's.
    weights = y[..., :, None] * x[..., None, :]  # (B, N, H0, W0)
    embeddings = unrounded_product(weights.view(-1, h0 * w0), table.to(dtype).flatten(0, 1))
    return embeddings.unflatten(0, positions.y.shape)


def _gathered_taps(table: Tensor, positions: TokenPositions, spec: ResizeSpec) -> Tensor:
    """The same in float32 by one gathered row of the table for each pair of taps."""
    h0, w0, _ = table.shape
    flat = table.to(torch.promote_types(table.dtype, torch.float32)).flatten(0, 1)  # (H0*W0, C)
    rows, row_weights = tap_weights(positions.y, positions.h, h0, spec)  # (B, N, taps)
    cols, col_weights = tap_weights(positions.x, positions.w, w0, spec)
    cells = rows[..., :, None] * w0 + cols[..., None, :]  # (B, N, taps, taps)
    weights = (row_weights[..., :, None] * col_weights[..., None, :]).to(flat.dtype)
    # Tap after tap: all at once would be 16 embeddings (B, N, C) in memory.
    embeddings = torch.zeros((), dtype=flat.dtype, device=flat.device)
    for cell, weight in zip(cells.flatten(2).unbind(-1), weights.flatten(2).split(1, -1)):
        embeddings = embeddings + F.embedding(cell, flat) * weight
    return embeddings
