"""The backend of plain tensor operations, which reads nothing back to the host: one graph for every
grid.

``torch.export`` and ``torch.jit.trace`` record these operations, so that a program runs without
this package; and ``torch.func`` transforms them.

Each token has a row of H0*W0 weights, computed from its coordinate in closed form, and one product
takes all tokens to their embeddings: (B, N, H0*W0) @ (H0*W0, C). It is float64: a graph cannot know
under which autocast and TF32 flags it will run, and those leave float64 alone.

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
from ..resampling.dense import resize, resize_factorized
from ..resampling.matrices import ResizeSpec


class TokenPositions(NamedTuple):
    """The grid (h, w) of each sample, and where on it each token lies: NaN where the host would
    raise an error."""

    h: Tensor  # (B, 1)
    w: Tensor  # (B, 1)
    y: Tensor  # (B, N) float32
    x: Tensor  # (B, N) float32
    embedded: Tensor  # (B, N) bool: these tokens get an embedding


def add(x: Tensor, tables: tuple[Tensor, ...], patch_coord: Tensor, spec: ResizeSpec) -> None:
    """Add the tables, resampled to each sample's grid, into ``x`` (B, N, C) in place; see
    ``dispatch.add``.

    Tokens may come in any order, and any may be missing. Those with a negative or non-finite
    coordinate get NaN, and those of a grid with far more cells than there are tokens. With
    ``spec.use_grid_sample`` every token is sampled at its coordinate, also at a negative one and
    between cells; only non-finite ones get NaN.
    """
    x.add_(embeddings(tables, patch_coord.to(x.device), spec, x.dtype))


def embeddings(
    tables: tuple[Tensor, ...], patch_coord: Tensor, spec: ResizeSpec, dtype: torch.dtype
) -> Tensor:
    """The embedding (B, N, C) of each token; that of padding is -0.0, which added changes no
    token."""
    if patch_coord.shape[1] == 0:
        return tables[0].new_zeros(*patch_coord.shape[:2], tables[0].shape[-1], dtype=dtype)
    positions = token_positions(patch_coord, spec)
    if len(tables) == 1:
        table = tables[0].reshape(tables[0].shape[-3:])  # (H0, W0, C)
        added = (_by_taps if few_taps(table, spec) else _by_product)(table, positions, spec).to(
            dtype
        )
    else:
        added = _factorized(tables, positions, spec, dtype)
    return added.masked_fill(~positions.embedded[..., None], -0.0)


def add_to_images(
    x: Tensor, tables: tuple[Tensor, ...], grid_size: Sequence[Any], spec: ResizeSpec
) -> None:
    """Add the tables, resized to the grid (h, w) of plain images, into each of them, ``x`` (B, h*w,
    C), in place."""
    learned = len(tables) == 1
    h, w = (torch.full((1,), n, device=x.device) for n in grid_size)
    tables64 = [table.reshape(table.shape[-3 if learned else -2 :]).double() for table in tables]
    table_size = tables64[0].shape if learned else (len(tables64[0]), len(tables64[1]))
    to = resized_size(h, w, spec, table_size if learned else None)
    a_h, a_w = (  # (h, H0) and (w, W0), float64
        axis_weights(torch.arange(keep, device=x.device), n, n0, spec)
        for keep, n, n0 in zip(grid_size, to, table_size)
    )
    x.add_(
        resize(tables64[0], a_h, a_w).to(x.dtype)
        if learned
        else resize_factorized(tables64, a_h, a_w, x.dtype)
    )


def gradient(
    g: Tensor, table_shape: Sequence[int], patch_coord: Tensor, spec: ResizeSpec
) -> Tensor:
    """The gradient (H0, W0, C) of a table resampled without antialiasing, from that of the tokens
    (B, N, C); float32 at least."""
    total = g.new_zeros(table_shape[0] * table_shape[1], g.shape[-1], dtype=torch.float64)
    positions = token_positions(patch_coord.to(g.device), spec)
    for cell, weight in _taps(table_shape, positions, spec):
        total.index_add_(0, cell.flatten(), (weight * g).flatten(0, 1))
    return total.view(*table_shape).to(torch.promote_types(g.dtype, torch.float32))


def repeat_frames(embeddings: Tensor, sizes: Tensor, embeds_padding: bool) -> Tensor:
    """Embeddings (B, N, C) of the first frames of images of ``sizes`` (B, 2) or (B, 3), for all
    frames and padding."""
    token = torch.arange(embeddings.shape[1], device=embeddings.device)  # (N)
    if sizes.shape[1] == 3:
        cell = token % sizes[:, 1:].prod(1, keepdim=True)  # (B, N)
        embeddings = embeddings.gather(1, cell[..., None].expand(-1, -1, embeddings.shape[-1]))
    padding = (
        embeddings[:, :1] if embeds_padding else torch.zeros_like(embeddings[:, :1])
    )  # (B, 1, C)
    return torch.where((token < sizes.prod(1, keepdim=True))[..., None], embeddings, padding)


def token_positions(patch_coord: Tensor, spec: ResizeSpec) -> TokenPositions:
    """The grids as timm reads them: largest coordinate + 1; a sample's first h*w tokens belong to
    its grid."""
    if spec.use_grid_sample:  # timm's grid_sample flag
        coord = patch_coord.detach().to(torch.float32)  # (B, N, 2)
        h, w = grid_sizes_from_coord(coord)[..., None].unbind(1)  # (B, 1)
        y, x = coord.unbind(-1)  # (B, N)
        return TokenPositions(h, w, y, x, torch.ones_like(y, dtype=torch.bool))
    coord = whole_numbers(patch_coord)  # (B, N, 2)
    h, w = grid_sizes_from_coord(coord)[..., None].unbind(1)  # (B, 1)
    in_grid = torch.arange(coord.shape[1], device=coord.device) < h * w  # (B, N)
    overflow = (h > MAX_COORDINATE) | (w > MAX_COORDINATE)
    no_grid = (h < 1) | (w < 1) | overflow | (h * w > 64 * coord.shape[1] + 4096)
    wrong = (in_grid & (coord < 0).any(-1)) | no_grid
    # Padding takes the place (0, 0): its own coordinate may be anything.
    coord = coord.masked_fill(~in_grid[..., None], 0)
    y, x = coord.to(torch.float32).masked_fill(wrong[..., None], torch.nan).unbind(-1)
    return TokenPositions(h.clamp(min=1), w.clamp(min=1), y, x, in_grid | wrong)


def _factorized(
    tables: tuple[Tensor, ...], positions: TokenPositions, spec: ResizeSpec, dtype: torch.dtype
) -> Tensor:
    to = resized_size(positions.h, positions.w, spec)
    y, x = (
        axis_weights(position, n, table.shape[-2], spec) @ table.flatten(0, -2).double()
        for table, position, n in zip(tables, (positions.y, positions.x), to)
    )
    return y.to(dtype) + x.to(dtype)  # timm casts both before it adds them


def resized_size(
    h: Tensor, w: Tensor, spec: ResizeSpec, table_size: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """The cells to which each axis is resized, before the crop, for grids (h, w); timm does not
    resize a learned table (``table_size``) of the grid's own size."""
    if not spec.ar_preserving:
        return h, w
    longest = torch.maximum(h, w)
    if table_size is None or spec.use_grid_sample:
        return longest, longest
    same = (h == table_size[0]) & (w == table_size[1])
    return torch.where(same, h, longest), torch.where(same, w, longest)


def few_taps(table: Tensor, spec: ResizeSpec) -> bool:
    """Whether gathered taps cost less than one product: on a CPU from 128 rows on, bilinear from 32
    (measured)."""
    taps = 16 if spec.interpolation == "bicubic" else 4
    return not spec.antialias and 8 * taps <= table.shape[0]


def _by_product(table: Tensor, positions: TokenPositions, spec: ResizeSpec) -> Tensor:
    """Each token's embedding (B, N, C) float64: one product with a row of H0*W0 weights for each
    token."""
    to = resized_size(positions.h, positions.w, spec, table.shape)
    y, x = (  # (B, N, H0) and (B, N, W0), float64
        axis_weights(position, n, n0, spec)
        for position, n, n0 in zip((positions.y, positions.x), to, table.shape)
    )
    weights = (y[..., :, None] * x[..., None, :]).flatten(-2)  # (B, N, H0*W0)
    return weights @ table.double().flatten(0, 1)


def _by_taps(table: Tensor, positions: TokenPositions, spec: ResizeSpec) -> Tensor:
    """The same in float32 by one gathered row of the table for each pair of taps."""
    flat = table.to(torch.promote_types(table.dtype, torch.float32)).flatten(0, 1)  # (H0*W0, C)
    embeddings = torch.zeros((), dtype=flat.dtype, device=flat.device)
    for cell, weight in _taps(table.shape, positions, spec):
        embeddings = embeddings + F.embedding(cell, flat) * weight.to(flat.dtype)
    return embeddings


def _taps(
    table_shape: Sequence[int], positions: TokenPositions, spec: ResizeSpec
) -> list[tuple[Tensor, Tensor]]:
    """For each pair of taps the cell that a token reads, (B, N), and its weight, (B, N, 1)
    float64."""
    to_h, to_w = resized_size(positions.h, positions.w, spec, table_shape)
    rows, row_weights = tap_weights(positions.y, to_h, table_shape[0], spec)  # (B, N, taps)
    cols, col_weights = tap_weights(positions.x, to_w, table_shape[1], spec)
    return [
        (row * table_shape[1] + col, (row_weight * col_weight)[..., None])
        for row, row_weight in zip(rows.unbind(-1), row_weights.unbind(-1))
        for col, col_weight in zip(cols.unbind(-1), col_weights.unbind(-1))
    ]
