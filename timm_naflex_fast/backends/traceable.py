"""The backend of plain tensor operations, which reads nothing back: one graph for every grid.

``torch.export`` and ``torch.jit.trace`` record these operations, so that a program runs without
this package; and ``torch.func`` transforms them.

Each token has a row of H0*W0 weights, computed from its coordinate in closed form, and one product
takes all tokens to their embeddings: (B, N, H0*W0) @ (H0*W0, C). A graph cannot know under which
autocast and TF32 flags it will run: ``resampling/precision.py`` says in which dtype products are.

Where a token reads few cells of a large table (``few_taps``), no product runs: ``_by_taps`` gathers
these cells and adds them in float32, which no flag rounds either. All plain images of a batch share
one grid: ``add_to_images`` resizes the table by two products, one for each axis.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch.checks import MAX_COORDINATE
from ..batch.grids import grid_sizes_from_coord, whole_numbers
from ..resampling.closed_form import axis_weights, tap_weights
from ..resampling.precision import product, unrounded_dtype
from ..resampling.spec import ResizeSpec


class TokenPositions(NamedTuple):
    """The grid (h, w) of each sample, and where on it each token lies.

    A position is NaN where the host would raise an error; with timm's grid_sample flag only where
    a coordinate is not finite.
    """

    h: Tensor  # (B, 1)
    w: Tensor  # (B, 1)
    y: Tensor  # (B, N) float32
    x: Tensor  # (B, N) float32
    embedded: Tensor  # (B, N) bool: these tokens get an embedding, or NaN


def add(x: Tensor, tables: tuple[Tensor, ...], patch_coord: Tensor, spec: ResizeSpec) -> None:
    """Add the tables, resampled to each sample's grid, into ``x`` (B, N, C) in place.

    See ``dispatch.add``. Tokens may come in any order, and any may be missing. Those with a
    negative or non-finite coordinate get NaN, and those of a grid with far more cells than there
    are tokens. With ``spec.use_grid_sample`` every token is sampled at its coordinate, also at a
    negative one and between cells; only non-finite ones get NaN.
    """
    if patch_coord.shape[1] == 0:
        return
    positions = token_positions(patch_coord.to(x.device), spec)
    if len(tables) == 1:
        table = tables[0].reshape(tables[0].shape[-3:])
        compute = _by_taps if few_taps(table, spec) else _by_product
        embeddings = compute(table, positions, spec).to(x.dtype)
    else:
        # Cast before they are added, as in timm.
        to_h, to_w = resized_size(positions.h, positions.w, spec)
        of_y = _by_line(tables[0], positions.y, to_h, spec).to(x.dtype)
        of_x = _by_line(tables[1], positions.x, to_w, spec).to(x.dtype)
        embeddings = of_y + of_x
    # -0.0, which added changes no token.
    x.add_(embeddings.masked_fill(~positions.embedded[..., None], -0.0))


def add_to_images(
    x: Tensor, tables: tuple[Tensor, ...], grid_size: Sequence[Any], spec: ResizeSpec
) -> None:
    """Add the tables, resized to the grid (h, w) of plain images, into ``x`` (B, h*w, C)."""
    h, w = (torch.full((1, 1), n, device=x.device) for n in grid_size)
    rows, columns = (torch.arange(n, device=x.device)[None] for n in grid_size)  # (1, h), (1, w)
    if len(tables) == 1:
        table = tables[0].reshape(tables[0].shape[-3:])  # (H0, W0, C)
        h0, w0, channels = table.shape
        to_h, to_w = resized_size(h, w, spec, (h0, w0))
        after_y = _by_line(table.flatten(1), rows, to_h, spec).view(-1, w0, channels)  # (h, W0, C)
        a_w = axis_weights(columns[0], to_w[0], w0, spec).to(after_y.dtype)  # (w, W0)
        embeddings = product(a_w, after_y).flatten(0, 1).to(x.dtype)  # (h*w, C)
    else:
        to_h, to_w = resized_size(h, w, spec)
        of_rows = _by_line(tables[0], rows, to_h, spec).to(x.dtype)  # (1, h, C)
        of_columns = _by_line(tables[1], columns, to_w, spec).to(x.dtype)  # (1, w, C)
        embeddings = (of_rows[:, :, None] + of_columns[:, None]).flatten(1, 2)
    x.add_(embeddings)


def repeat_frames(embeddings: Tensor, sizes: Tensor, embeds_padding: bool) -> Tensor:
    """The first frame's embeddings (B, N, C), repeated for all frames, and those of padding.

    ``sizes`` (B, 2) as (h, w) or (B, 3) as (t, h, w).
    """
    token = torch.arange(embeddings.shape[1], device=embeddings.device)  # (N)
    if sizes.shape[1] == 3:
        cell = token % sizes[:, 1:].prod(1, keepdim=True)  # (B, N)
        embeddings = embeddings.gather(1, cell[..., None].expand(-1, -1, embeddings.shape[-1]))
    padding = embeddings[:, :1]  # (B, 1, C)
    if not embeds_padding:
        padding = torch.zeros_like(padding)
    is_own = token < sizes.prod(1, keepdim=True)  # (B, N)
    return torch.where(is_own[..., None], embeddings, padding)


def token_positions(patch_coord: Tensor, spec: ResizeSpec) -> TokenPositions:
    """The grids as timm reads them: the largest coordinate + 1.

    A sample's first h*w tokens belong to its grid.
    """
    if spec.use_grid_sample:
        coord = patch_coord.detach().to(torch.float32)  # (B, N, 2)
    else:
        coord = whole_numbers(patch_coord).clamp(max=MAX_COORDINATE)
    length = coord.shape[1]
    h, w = grid_sizes_from_coord(coord)[..., None].unbind(1)  # (B, 1)
    if spec.use_grid_sample:  # at any coordinate, of padding too
        y, x = coord.unbind(-1)  # (B, N)
        return TokenPositions(h, w, y, x, torch.ones_like(y, dtype=torch.bool))

    in_grid = torch.arange(length, device=coord.device) < h * w  # (B, N)
    no_grid = (h < 1) | (w < 1) | (h * w > 64 * length + 4096)  # (B, 1)
    wrong = (in_grid & (coord < 0).any(-1)) | no_grid  # (B, N)

    # Padding takes the place (0, 0): its own coordinate may be anything.
    coord = coord.masked_fill(~in_grid[..., None], 0).to(torch.float32)
    y, x = coord.masked_fill(wrong[..., None], torch.nan).unbind(-1)
    return TokenPositions(h.clamp(min=1), w.clamp(min=1), y, x, in_grid | wrong)


def resized_size(
    h: Tensor, w: Tensor, spec: ResizeSpec, table_size: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """The cells to which each axis is resized, before the crop, for grids (h, w).

    timm does not resize a learned table, of ``table_size``, for a grid of the table's own size.
    """
    if not spec.ar_preserving:
        return h, w
    longest = torch.maximum(h, w)
    if table_size is None or spec.use_grid_sample:
        return longest, longest
    is_same = (h == table_size[0]) & (w == table_size[1])
    return torch.where(is_same, h, longest), torch.where(is_same, w, longest)


def few_taps(table: Tensor, spec: ResizeSpec) -> bool:
    """Whether gathered taps cost less than one product.

    On a CPU from 128 rows on, bilinear from 32 (measured).
    """
    taps = 16 if spec.interpolation == "bicubic" else 4
    return not spec.antialias and 8 * taps <= table.shape[0]


def _by_line(table: Tensor, position: Tensor, n: Tensor, spec: ResizeSpec) -> Tensor:
    """Each token's line (B, N, C) of a factorized table ([1,] N0, C), resized to n."""
    lines = table.flatten(0, -2).to(unrounded_dtype(table))  # (N0, C)
    weights = axis_weights(position, n, len(lines), spec).to(lines.dtype)  # (B, N, N0)
    return product(weights.flatten(0, 1), lines).unflatten(0, position.shape)


def _by_product(table: Tensor, positions: TokenPositions, spec: ResizeSpec) -> Tensor:
    """One product with a row of H0*W0 weights for each token: (B, N, C)."""
    h0, w0, _ = table.shape
    dtype = unrounded_dtype(table)
    to_h, to_w = resized_size(positions.h, positions.w, spec, (h0, w0))
    y = axis_weights(positions.y, to_h, h0, spec).to(dtype)  # (B, N, H0)
    x = axis_weights(positions.x, to_w, w0, spec).to(dtype)  # (B, N, W0)
    weights = y[..., :, None] * x[..., None, :]  # (B, N, H0, W0)
    embeddings = product(weights.view(-1, h0 * w0), table.to(dtype).flatten(0, 1))
    return embeddings.unflatten(0, positions.y.shape)


def _by_taps(table: Tensor, positions: TokenPositions, spec: ResizeSpec) -> Tensor:
    """The same in float32 by one gathered row of the table for each pair of taps."""
    h0, w0, _ = table.shape
    flat = table.to(torch.promote_types(table.dtype, torch.float32)).flatten(0, 1)  # (H0*W0, C)
    to_h, to_w = resized_size(positions.h, positions.w, spec, (h0, w0))
    rows, row_weights = tap_weights(positions.y, to_h, h0, spec)  # (B, N, taps)
    cols, col_weights = tap_weights(positions.x, to_w, w0, spec)
    embeddings = torch.zeros((), dtype=flat.dtype, device=flat.device)
    for i in range(rows.shape[-1]):
        for j in range(cols.shape[-1]):
            cell = rows[..., i] * w0 + cols[..., j]  # (B, N)
            weight = row_weights[..., i] * col_weights[..., j]
            embeddings = embeddings + F.embedding(cell, flat) * weight[..., None].to(flat.dtype)
    return embeddings
