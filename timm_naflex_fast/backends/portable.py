"""The backend of plain tensor operations, which reads nothing back to the host: one graph for every grid.

``torch.export`` and ``torch.jit.trace`` record these operations, so that a program runs without this package; and
``torch.func`` transforms them.

Each token needs ``sum_ij a[i] b[j] P[i, j]``. To share the first contraction, a sample's tokens are sorted along the
shorter axis of its grid ("lines") and cut into blocks of at most ``BLOCK`` tokens of one line, which fit a layout whose
size follows from the shape of ``x`` alone. Then

1. per block, one row of the resize matrix times the table: (B*Q, H0 + W0) @ (H0 + W0, L0*C),
2. per block, a row of the other axis' matrix for each token: (B*Q, BLOCK, L0) @ (B*Q, L0, C),
3. every token reads its slot.

All are products and gathers, and no gradient is accumulated by atomics. The products are float64: a graph
cannot know under which autocast and TF32 flags it will run, and those leave float64 alone.

Where a token reads few cells of a large table (``few_taps``), no product runs: ``_by_taps`` gathers these cells and
adds them in float32, which no flag rounds either.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..resampling.checks import LARGEST
from ..resampling.closed_form import axis_weights, tap_weights
from ..resampling.grids import whole_numbers
from ..resampling.matrices import ResizeSpec

BLOCK = 16


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


class SlotLayout(NamedTuple):
    """The slots of the tokens: Q blocks per sample, BLOCK slots per block; empty slots name token 0.

    ``slot_of_token`` (B, N) counts over a sample's Q * BLOCK slots, ``token_of_slot`` (B, Q, BLOCK) is its inverse,
    ``by_column`` (B, 1) tells whose lines are columns.
    """

    slot_of_token: Tensor
    token_of_slot: Tensor
    by_column: Tensor


def add(x: Tensor, tables: tuple[Tensor, ...], patch_coord: Tensor, spec: ResizeSpec) -> None:
    """Add the tables, resampled to each sample's grid, into ``x`` (B, N, C) in place; see ``dispatch.add``.

    Tokens may come in any order, and up to three quarters of a grid's tokens may be missing. If more are missing, the
    layout has no room for some tokens, which get NaN, never a wrong number. So do tokens with a negative or non-finite
    coordinate, and those of a grid with far more cells than there are tokens.
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
    size = coord.amax(1, keepdim=True) + 1
    h, w = size.unbind(-1)
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
    return (_by_taps if few_taps(table, spec) else _by_blocks)(table, grids, spec).to(token_dtype)


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


def slot_layout(grids: DeviceGrids) -> SlotLayout:
    """Sort each sample's tokens by line, and begin a new block wherever a line begins or a block is full.

    With BLOCK = 2 and the lines 0 0 0 1 1 (sorted), the slots are 0 1 2 4 5, and slot 3 stays empty.
    """
    batch, length = grids.y.shape
    blocks = block_count(length)
    by_column = grids.h > grids.w
    line, order = torch.where(by_column, grids.x, grids.y).sort(dim=1)
    place = torch.arange(length, device=line.device).expand(batch, length)  # 0 1 2 3 4
    begins = (line != line.gather(1, (place - 1).clamp(min=0))) | (place == 0)  # 1 0 0 1 0
    rank = begins.to(line.dtype).cumsum(1) - 1  # of the line among those present: 0 0 0 1 1
    # Where each line begins, by its rank: 0 3. Its first token writes that; the others write to a spare column, which
    # nothing reads. (cummax would be shorter, but ONNX has none.)
    spare = torch.full_like(rank, length)
    start = torch.zeros_like(F.pad(line, (0, 1))).scatter(1, torch.where(begins, rank, spare), place)
    place_in_line = place - start.gather(1, rank)  # 0 1 2 0 1
    block = (place_in_line % BLOCK == 0).to(line.dtype).cumsum(1) - 1  # 0 0 1 2 2
    slot = (block * BLOCK + place_in_line % BLOCK).clamp(max=blocks * BLOCK)  # no room: the last, which nothing reads
    empty = slot.new_zeros(batch, blocks * BLOCK + 1)  # pragma: no mutate: more slots would do as well
    # Read out by index: a view that splits a dimension would make tracers check divisibility.
    slots = torch.arange(blocks, device=line.device)[:, None] * BLOCK + torch.arange(BLOCK, device=line.device)
    token_of_slot = empty.scatter(1, slot, order)[:, slots]
    return SlotLayout(torch.zeros_like(slot).scatter(1, order, slot), token_of_slot, by_column)


def block_count(length: int) -> int:
    """Q, the blocks a sample of ``length`` tokens has room for.

    A line of n tokens takes ceil(n / BLOCK) blocks, so a sample takes at most N / BLOCK + lines. The shorter axis has
    at most sqrt(h*w) lines, and h*w <= 4 N while at most three quarters of a grid's tokens were dropped:
    2 sqrt(N) <= N / 24 + 24.
    """
    return length // BLOCK + length // 24 + 28


def block_weights(
    layout: SlotLayout, grids: DeviceGrids, table_size: tuple[int, ...], spec: ResizeSpec
) -> tuple[Tensor, Tensor]:
    """The two rows of resize matrices, float64: per block (B, Q, H0 + W0), per slot (B, Q, BLOCK, L0).

    A block of row lines has zeros in the last W0 columns, one of column lines in the first H0. L0 = max(H0, W0).
    """
    rows, cols = table_size
    weights = partial(axis_weights, spec=spec)
    to_h, to_w = lengths(grids, table_size, spec)
    head = layout.token_of_slot[..., 0]
    row = weights(grids.y.gather(1, head), to_h, rows) * ~layout.by_column[..., None]
    col = weights(grids.x.gather(1, head), to_w, cols) * layout.by_column[..., None]
    side = max(rows, cols)
    along = torch.where(
        layout.by_column[..., None],
        F.pad(weights(grids.y, to_h, rows), (0, side - rows)),
        F.pad(weights(grids.x, to_w, cols), (0, side - cols)),
    )
    sample = torch.arange(along.shape[0], device=along.device)[:, None, None]
    along = along[sample, layout.token_of_slot]
    return torch.cat((row, col), -1), along


def lines_of(table: Tensor) -> Tensor:
    """The table (H0, W0, C) by rows and by columns, lines padded to L0 cells: (H0 + W0, L0, C)."""
    rows, cols = table.shape[:2]
    side = max(rows, cols)
    turned = table.transpose(0, 1)
    return torch.cat((F.pad(table, (0, 0, 0, side - cols)), F.pad(turned, (0, 0, 0, side - rows))))


def few_taps(table: Tensor, spec: ResizeSpec) -> bool:
    """Whether gathered taps cost less than products: a gathered one costs about eight multiply-adds (measured)."""
    taps = 16 if spec.interpolation == "bicubic" else 4
    return not spec.antialias and 8 * taps <= table.shape[0]


def _by_blocks(table: Tensor, grids: DeviceGrids, spec: ResizeSpec) -> Tensor:
    """Each token's embedding (B, N, C), float32 at least, by two products per block."""
    layout = slot_layout(grids)
    across, along = block_weights(layout, grids, table.shape[:2], spec)
    wide = lines_of(table.double())
    lines = torch.matmul(across, wide.flatten(1)).unflatten(2, wide.shape[1:])  # (B, Q, L0, C)
    of_slots = torch.matmul(along, lines).to(torch.promote_types(table.dtype, torch.float32)).flatten(1, 2)
    slots, room = layout.slot_of_token, of_slots.shape[1]  # of_slots: (B, Q*BLOCK, C)
    first = torch.arange(of_slots.shape[0], device=of_slots.device)[:, None] * room
    # An embedding, because its backward adds up without atomics.
    embeddings = F.embedding(first + slots.clamp(max=room - 1), of_slots.flatten(0, 1))
    return torch.where((slots < room)[..., None], embeddings, torch.full_like(embeddings, torch.nan))


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
