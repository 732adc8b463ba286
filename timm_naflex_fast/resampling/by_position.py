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
from .precision import product, unrounded_dtype
from .spec import ResizeSpec, Size


class TokenPositions(NamedTuple):
    """The grid (h, w) of each sample, or the size to which the table is resized for it, and where on
    it each token lies.

    A position is NaN where the host would raise an error; with timm's grid_sample flag only where
    a coordinate is not finite.
    """

    h: Tensor  # (B, 1)
    w: Tensor  # (B, 1)
    y: Tensor  # (B, N) float32
    x: Tensor  # (B, N) float32


def resized(positions: TokenPositions, spec: ResizeSpec, own_size: Size | None) -> TokenPositions:
    """The same with the cells to which each axis is resized, before the crop, as h and w.

    ``own_size``: that of grids for which timm does not resize the table.
    """
    if not spec.ar_preserving:
        return positions
    h, w, y, x = positions
    to_h = to_w = torch.maximum(h, w)
    if own_size is not None:
        is_own = (h == own_size[0]) & (w == own_size[1])
        to_h = torch.where(is_own, h, to_h)
        to_w = torch.where(is_own, w, to_w)
    return TokenPositions(to_h, to_w, y, x)


def reads_few_cells(table: Tensor, spec: ResizeSpec) -> bool:
    """Whether gathered taps cost less than one product.

    On a CPU from 128 rows on, bilinear from 32 (measured).
    """
    # A product reads every cell of the table for each token; taps only those that have a weight.
    taps = 16 if spec.interpolation == "bicubic" else 4
    return not spec.antialias and 8 * taps <= table.shape[0]


def resized_lines(lines: Tensor, position: Tensor, n: Tensor, spec: ResizeSpec) -> Tensor:
    """The line (..., C) of each position (...) from lines (N0, C) of one axis, resized to n."""
    lines = lines.to(unrounded_dtype(lines))
    # All tokens of the batch in one product: a graph that serves every grid has no loop over them.
    weights = axis_weights(position, n, len(lines), spec).to(lines.dtype)  # (..., N0)
    return product(weights.flatten(0, -2), lines).unflatten(0, position.shape)


def one_product(table: Tensor, positions: TokenPositions, spec: ResizeSpec) -> Tensor:
    """One product with a row of H0*W0 weights for each token: (B, N, C)."""
    h0, w0, _ = table.shape
    dtype = unrounded_dtype(table)
    y = axis_weights(positions.y, positions.h, h0, spec).to(dtype)  # (B, N, H0)
    x = axis_weights(positions.x, positions.w, w0, spec).to(dtype)  # (B, N, W0)
    # Resizing is separable: a cell's weight is its row's times its column's.
    weights = y[..., :, None] * x[..., None, :]  # (B, N, H0, W0)
    embeddings = product(weights.view(-1, h0 * w0), table.to(dtype).flatten(0, 1))
    return embeddings.unflatten(0, positions.y.shape)


def gathered_taps(table: Tensor, positions: TokenPositions, spec: ResizeSpec) -> Tensor:
    """The same in float32 by one gathered row of the table for each pair of taps."""
    h0, w0, _ = table.shape
    flat = table.to(torch.promote_types(table.dtype, torch.float32)).flatten(0, 1)  # (H0*W0, C)
    rows, row_weights = tap_weights(positions.y, positions.h, h0, spec)  # (B, N, taps)
    cols, col_weights = tap_weights(positions.x, positions.w, w0, spec)
    # Tap after tap: all at once would be 16 embeddings (B, N, C) in memory.
    embeddings = torch.zeros((), dtype=flat.dtype, device=flat.device)
    for i in range(rows.shape[-1]):
        for j in range(cols.shape[-1]):
            cell = rows[..., i] * w0 + cols[..., j]  # (B, N)
            weight = row_weights[..., i] * col_weights[..., j]
            embeddings = embeddings + F.embedding(cell, flat) * weight[..., None].to(flat.dtype)
    return embeddings


def product_per_axis(table: Tensor, positions: TokenPositions, spec: ResizeSpec) -> Tensor:
    """A table (H0, W0, C) resized to one grid by a product for each axis: (1, h*w, C).

    ``positions`` of its rows (1, h), and of its columns (1, w).
    """
    _, w0, channels = table.shape
    # Along y a row of the table is one long line (W0*C).
    after_y = resized_lines(table.flatten(1), positions.y, positions.h, spec)  # (1, h, W0*C)
    after_y = after_y.view(-1, w0, channels)  # (h, W0, C)
    a_w = axis_weights(positions.x[0], positions.w[0], w0, spec).to(after_y.dtype)  # (w, W0)
    return product(a_w, after_y).flatten(0, 1)[None]
