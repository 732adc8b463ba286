"""The backend of plain tensor operations, which reads nothing back to the host: one graph for every grid.

``torch.export`` and ``torch.jit.trace`` record these operations, so that a program runs without this package; and
``torch.func`` transforms them.

Each token has a row of H0*W0 weights, computed from its coordinate in closed form, and one product takes all tokens to
their embeddings: (B, N, H0*W0) @ (H0*W0, C). It is float64: a graph cannot know under which autocast and TF32 flags it
will run, and those leave float64 alone.

Where a token reads few cells of a large table (``few_taps``), no product runs: ``_by_taps`` gathers these cells and
adds them in float32, which no flag rounds either.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..resampling.checks import LARGEST
from ..resampling.closed_form import axis_weights, tap_weights
from ..resampling.grids import whole_numbers
from ..resampling.matrices import ResizeSpec


class DeviceGrids(NamedTuple):
    """The batch's grids on the device: per sample (B, 1), per token (B, N).

    ``y`` and ``x`` name each token's cell. ``embedded`` tokens get an embedding; those that are ``wrong`` get NaN,
    where the host would have raised an error.
    """

    h: Tensor
    w: Tensor
    y: Tensor
    x: Tensor
    embedded: Tensor
    wrong: Tensor


def add(x: Tensor, tables: tuple[Tensor, ...], patch_coord: Tensor, spec: ResizeSpec) -> None:
    """Add the tables, resampled to each sample's grid, into ``x`` (B, N, C) in place; see ``dispatch.add``.

    Tokens may come in any order, and any may be missing. Those with a negative or non-finite coordinate get NaN, and
    those of a grid with far more cells than there are tokens.
    """
    if x.shape[1] == 0:
        return
    grids = grids_on_device(patch_coord.to(x.device), spec)
    resample = _learned if len(tables) == 1 else _factorized
    embeddings = resample(tables, grids, spec, x.dtype)
    embeddings = embeddings.masked_fill(grids.wrong[..., None], torch.nan)
    # Adding -0.0 changes no token.
    x.add_(torch.where(grids.embedded[..., None], embeddings, torch.full_like(embeddings, -0.0)))


def embeddings(table: Tensor, patch_coord: Tensor, spec: ResizeSpec) -> Tensor:
    """The embedding (B, N, C) of each token in a new tensor, in the table's dtype; that of padding means nothing."""
    return _learned((table,), grids_on_device(patch_coord, spec), spec, table.dtype)


def repeat_frames(embeddings: Tensor, sizes: Tensor, embeds_padding: bool) -> Tensor:
    """Embeddings (B, N, C) of the first frames of images of ``sizes`` (B, 2) or (B, 3), for all frames and padding."""
    token = torch.arange(embeddings.shape[1], device=embeddings.device)
    if sizes.shape[1] == 3:
        cell = token % sizes[:, 1:].prod(1, keepdim=True)
        embeddings = embeddings.gather(1, cell[..., None].expand(-1, -1, embeddings.shape[-1]))
    padding = embeddings[:, :1] if embeds_padding else torch.zeros_like(embeddings[:, :1])
    return torch.where((token < sizes.prod(1, keepdim=True))[..., None], embeddings, padding)


def coordinates(sizes: Tensor, length: int, merge: int = 1) -> Tensor:
    """Coordinates (B, length, 2) from sizes (B, 2) or (B, 3); tokens after the first frame carry (0, 0)."""
    h, w = sizes[:, -2:, None].unbind(1)
    cell = torch.arange(length, device=sizes.device)[None]
    block, inner = cell // (merge * merge), cell % (merge * merge)
    y = block // (w // merge) * merge + inner // merge
    x = block % (w // merge) * merge + inner % merge
    return torch.stack((y, x), -1) * (cell < h * w)[..., None]


def grids_on_device(patch_coord: Tensor, spec: ResizeSpec) -> DeviceGrids:
    """The grids as timm reads them: largest coordinate + 1; a sample's first h*w tokens belong to it."""
    coord = whole_numbers(patch_coord)
    length = coord.shape[1]
    h, w = (axis.amax(1, keepdim=True) + 1 for axis in coord.unbind(-1))
    size = torch.stack((h, w), -1)
    in_grid = torch.arange(length, device=coord.device) < h * w
    negative = (coord < 0).any(-1)
    no_grid = (size < 1).any(-1) | (size > LARGEST).any(-1) | (h * w > 64 * length + 4096)  # (B, 1)
    wrong = (in_grid & negative) | no_grid
    takes_cell = in_grid & ~wrong
    if spec.embeds_padding:  # padding tokens get the cell that their coordinate names, or (0, 0) where it names none
        takes_cell = (takes_cell | (~negative & (coord < size).all(-1))) & ~wrong
    y, x = (coord * takes_cell[..., None]).unbind(-1)
    embedded = torch.ones_like(in_grid) if spec.embeds_padding else in_grid | wrong
    return DeviceGrids(h.clamp(min=1), w.clamp(min=1), y, x, embedded, wrong)


def _learned(tables: tuple[Tensor, ...], grids: DeviceGrids, spec: ResizeSpec, token_dtype: torch.dtype) -> Tensor:
    table = tables[0].reshape(tables[0].shape[-3:])
    if not spec.copies_own_size:  # the same positions and weights as F.interpolate's, without antialiasing
        spec = replace(spec, antialias=False)
    return (_by_taps if few_taps(table, spec) else _by_product)(table, grids, spec).to(token_dtype)


def _factorized(tables: tuple[Tensor, ...], grids: DeviceGrids, spec: ResizeSpec, token_dtype: torch.dtype) -> Tensor:
    rows, cols = (torch.maximum(grids.h, grids.w),) * 2 if spec.ar_preserving else (grids.h, grids.w)
    y, x = (
        axis_weights(position, length, table.shape[-2], spec) @ table.reshape(table.shape[-2:]).double()
        for table, position, length in zip(tables, (grids.y, grids.x), (rows, cols))
    )
    return y.to(token_dtype) + x.to(token_dtype)  # timm casts both before it adds them


def lengths(grids: DeviceGrids, table_size: tuple[int, ...], spec: ResizeSpec) -> tuple[Tensor, Tensor]:
    """The length to which each axis of the table is resized, both (B, 1), before the crop; timm does not resize a table
    of the grid's own size."""
    if not spec.ar_preserving:
        return grids.h, grids.w
    longest = torch.maximum(grids.h, grids.w)
    if not spec.copies_own_size:
        return longest, longest
    same = (grids.h == table_size[0]) & (grids.w == table_size[1])
    return torch.where(same, grids.h, longest), torch.where(same, grids.w, longest)


def few_taps(table: Tensor, spec: ResizeSpec) -> bool:
    """Whether gathered taps cost less than products: a gathered one costs about eight multiply-adds (measured)."""
    taps = 16 if spec.interpolation == "bicubic" else 4
    return not spec.antialias and 8 * taps <= table.shape[0]


def _by_product(table: Tensor, grids: DeviceGrids, spec: ResizeSpec) -> Tensor:
    """Each token's embedding (B, N, C), float32 at least: one product with a row of H0*W0 weights for each token."""
    y, x = (
        axis_weights(position, length, cells, spec)
        for position, length, cells in zip((grids.y, grids.x), lengths(grids, table.shape[:2], spec), table.shape[:2])
    )
    weights = (y[..., :, None] * x[..., None, :]).flatten(-2)  # (B, N, H0*W0) float64
    return (weights @ table.double().flatten(0, 1)).to(torch.promote_types(table.dtype, torch.float32))


def _by_taps(table: Tensor, grids: DeviceGrids, spec: ResizeSpec) -> Tensor:
    """The same by one gathered row of the table for each pair of taps."""
    to_h, to_w = lengths(grids, table.shape[:2], spec)
    rows, row_weights = tap_weights(grids.y, to_h, table.shape[0], spec)
    cols, col_weights = tap_weights(grids.x, to_w, table.shape[1], spec)
    flat = table.to(torch.promote_types(table.dtype, torch.float32)).flatten(0, 1)
    embeddings = torch.zeros((), dtype=flat.dtype, device=flat.device)
    for row, row_weight in zip(rows.unbind(-1), row_weights.unbind(-1)):
        for col, col_weight in zip(cols.unbind(-1), col_weights.unbind(-1)):
            weight = (row_weight * col_weight).to(flat.dtype)[..., None]
            embeddings = embeddings + F.embedding(row * table.shape[1] + col, flat) * weight
    return embeddings
