"""The matmul strategy in plain tensor operations that read nothing back to the host: one graph for every grid.

Each token needs ``sum_ij a[i] b[j] P[i, j]``. To share the first contraction, a sample's tokens are sorted along the
shorter axis of its grid ("lines") and cut into blocks of at most ``BLOCK`` tokens of one line, which fit a layout whose
size follows from the shape of ``x`` alone. Then

1. per block, one row of the resize matrix times the table: (B*Q, H0 + W0) @ (H0 + W0, L0*C),
2. per block, a row of the other axis' matrix for each token: (B*Q, BLOCK, L0) @ (B*Q, L0, C),
3. every token reads its slot.

All are products and gathers, and no gradient is accumulated by atomics. The products are float64: a graph
cannot know under which autocast and TF32 flags it will run, and those leave float64 alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..resampling.closed_form import axis_weights, tap_weights
from ..resampling.matrices import ResizeSpec

BLOCK = 16


class Grids(NamedTuple):
    """The batch's grids on the device: per sample (B, 1), per token (B, N)."""

    h: Tensor
    w: Tensor
    y: Tensor
    x: Tensor
    in_grid: Tensor


class Plan(NamedTuple):
    """The slots of the tokens: Q blocks per sample, BLOCK slots per block; empty slots name token 0.

    ``slot_of_token`` (B, N) counts over a sample's Q * BLOCK slots, ``token_of_slot`` (B, Q, BLOCK) is its inverse,
    ``by_column`` (B, 1) tells whose lines are columns.
    """

    slot_of_token: Tensor
    token_of_slot: Tensor
    by_column: Tensor


def add_learned(x: Tensor, table: Tensor, patch_coord: Tensor, how: ResizeSpec) -> None:
    """Add the table ([1,] H0, W0, C), resampled to each sample's grid, into ``x`` (B, N, C) in place.

    Tokens may come in any order, and up to three quarters of a grid's tokens may be missing. If more are missing, the
    layout has no room for some tokens, which get NaN, never a wrong number.
    """
    if x.shape[1] == 0:
        return
    table, grids = table.reshape(table.shape[-3:]), read_grids(patch_coord, how)
    if how.sampler != "interpolate":  # the same positions and weights as F.interpolate's, without antialiasing
        how = ResizeSpec(how.mode, False, how.align_corners, how.ar_preserving, how.sampler)
    cells = (_by_taps if few_taps(table, how) else _by_blocks)(table, grids, how)
    add_in_grid(x, cells.to(x.dtype), grids)


def add_factorized(x: Tensor, table_y: Tensor, table_x: Tensor, patch_coord: Tensor, how: ResizeSpec) -> None:
    """Add ``y + x`` of the tables ([1,] H0, C) and ([1,] W0, C), resized by 1-D ``linear``, into ``x`` in place."""
    if x.shape[1] == 0:
        return
    grids = read_grids(patch_coord, how)
    rows, cols = (torch.maximum(grids.h, grids.w),) * 2 if how.ar_preserving else (grids.h, grids.w)
    y, x_ = (
        (axis_weights(position, length, table.shape[-2], mode="linear") @ table.reshape(table.shape[-2:]).double())
        for table, position, length in ((table_y, grids.y, rows), (table_x, grids.x, cols))
    )
    add_in_grid(x, y.to(x.dtype) + x_.to(x.dtype), grids)  # timm casts both before it adds them


def read_grids(patch_coord: Tensor, how: ResizeSpec) -> Grids:
    """The grids as timm reads them: largest coordinate + 1; a sample's first h*w tokens belong to it."""
    coord = patch_coord.detach().to(torch.int64)
    h, w = (coord.amax(1, keepdim=True) + 1).unbind(-1)
    in_grid = torch.arange(coord.shape[1], device=coord.device) < h * w
    if how.sampler != "interpolate":  # padding tokens get the cell that their coordinate names
        in_grid = torch.ones_like(in_grid)
    y, x = (coord * in_grid[..., None]).unbind(-1)  # padding counts as (0, 0)
    return Grids(h, w, y, x, in_grid)


def lengths(grids: Grids, table_size: tuple[int, ...], how: ResizeSpec) -> tuple[Tensor, Tensor]:
    """The length to which each axis of the table is resized, both (B, 1), before the crop; timm does not resize a table
    of the grid's own size."""
    if not how.ar_preserving:
        return grids.h, grids.w
    longest = torch.maximum(grids.h, grids.w)
    same = (grids.h == table_size[0]) & (grids.w == table_size[1]) & (how.sampler == "interpolate")
    return torch.where(same, grids.h, longest), torch.where(same, grids.w, longest)


def make_plan(grids: Grids) -> Plan:
    """Sort each sample's tokens by line and deal them into blocks."""
    batch, length = grids.y.shape
    blocks = block_count(length)
    by_column = grids.h > grids.w
    line, order = torch.where(by_column, grids.x, grids.y).sort(dim=1)
    place = torch.arange(length, device=line.device).expand(batch, length)
    before = line.gather(1, (place - 1).clamp(min=0))
    first = ((line != before) | (place == 0)).to(line.dtype)
    which = first.cumsum(1) - 1  # the line's rank among the lines present
    # A line starts at the place of its first token; the others write to a spare column, which nothing reads. (cummax
    # would be shorter, but ONNX has none.)
    spare = torch.full_like(which, length)
    start = torch.zeros_like(F.pad(line, (0, 1))).scatter(1, torch.where(first > 0, which, spare), place)
    within = place - start.gather(1, which)
    block = (within % BLOCK == 0).to(line.dtype).cumsum(1) - 1
    slot = (block * BLOCK + within % BLOCK).clamp(max=blocks * BLOCK)  # without room: the last, which nothing reads
    empty = slot.new_zeros(batch, blocks * BLOCK + 1)
    # Read out by index: a view that splits a dimension would make tracers check divisibility.
    slots = torch.arange(blocks, device=line.device)[:, None] * BLOCK + torch.arange(BLOCK, device=line.device)
    token_of_slot = empty.scatter(1, slot, order)[:, slots]
    return Plan(torch.zeros_like(slot).scatter(1, order, slot), token_of_slot, by_column)


def block_count(length: int) -> int:
    """Q, the blocks a sample of ``length`` tokens has room for.

    A line of n tokens takes ceil(n / BLOCK) blocks, so a sample takes at most N / BLOCK + lines. The shorter axis has
    at most sqrt(h*w) lines, and h*w <= 4 N while at most three quarters of a grid's tokens were dropped:
    2 sqrt(N) <= N / 24 + 24.
    """
    return length // BLOCK + length // 24 + 28


def block_weights(plan: Plan, grids: Grids, table_size: tuple[int, ...], how: ResizeSpec) -> tuple[Tensor, Tensor]:
    """The two rows of resize matrices, float64: per block (B, Q, H0 + W0), per slot (B, Q, BLOCK, L0).

    A block of row lines has zeros in the last W0 columns, one of column lines in the first H0. L0 = max(H0, W0).
    """
    rows, cols = table_size

    def weights(position: Tensor, length: Tensor, n0: int) -> Tensor:
        a, c = how.antialias, how.align_corners
        return axis_weights(position, length, n0, mode=how.mode, antialias=a, align_corners=c)

    to_h, to_w = lengths(grids, table_size, how)
    head = plan.token_of_slot[..., 0]
    row = weights(grids.y.gather(1, head), to_h, rows) * ~plan.by_column[..., None]
    col = weights(grids.x.gather(1, head), to_w, cols) * plan.by_column[..., None]
    side = max(rows, cols)
    along = torch.where(
        plan.by_column[..., None],
        F.pad(weights(grids.y, to_h, rows), (0, side - rows)),
        F.pad(weights(grids.x, to_w, cols), (0, side - cols)),
    )
    sample = torch.arange(along.shape[0], device=along.device)[:, None, None]
    along = along[sample, plan.token_of_slot]
    return torch.cat((row, col), -1), along


def lines_of(table: Tensor) -> Tensor:
    """The table (H0, W0, C) by rows and by columns, lines padded to L0 cells: (H0 + W0, L0, C)."""
    rows, cols = table.shape[:2]
    side = max(rows, cols)
    turned = table.transpose(0, 1)
    return torch.cat((F.pad(table, (0, 0, 0, side - cols)), F.pad(turned, (0, 0, 0, side - rows))))


def add_in_grid(x: Tensor, cells: Tensor, grids: Grids) -> None:
    """``x += cells`` on the tokens of the grids; adding -0.0 changes no other token."""
    x.add_(torch.where(grids.in_grid[..., None], cells, torch.full_like(cells, -0.0)))


def few_taps(table: Tensor, how: ResizeSpec) -> bool:
    """Whether gathered taps cost less than products: a gathered one costs about eight multiply-adds (measured)."""
    reads = 16 if how.mode == "bicubic" else 4
    return not how.antialias and 8 * reads <= table.shape[0]


def _by_blocks(table: Tensor, grids: Grids, how: ResizeSpec) -> Tensor:
    """Each token's embedding (B, N, C), float32 at least, by two products per block."""
    plan = make_plan(grids)
    across, along = block_weights(plan, grids, table.shape[:2], how)
    wide = lines_of(table.double())
    lines = torch.matmul(across, wide.flatten(1)).unflatten(2, wide.shape[1:])  # (B, Q, L0, C)
    cells = torch.matmul(along, lines).to(torch.promote_types(table.dtype, torch.float32)).flatten(1, 2)
    slots, room = plan.slot_of_token, cells.shape[1]  # (B, Q*BLOCK, C)
    first = torch.arange(cells.shape[0], device=cells.device)[:, None] * room
    # An embedding, because its backward adds up without atomics.
    cells_of_tokens = F.embedding(first + slots.clamp(max=room - 1), cells.flatten(0, 1))
    return torch.where((slots < room)[..., None], cells_of_tokens, torch.full_like(cells_of_tokens, torch.nan))


def _by_taps(table: Tensor, grids: Grids, how: ResizeSpec) -> Tensor:
    to_h, to_w = lengths(grids, table.shape[:2], how)
    rows, row_weights = tap_weights(grids.y, to_h, table.shape[0], mode=how.mode, align_corners=how.align_corners)
    cols, col_weights = tap_weights(grids.x, to_w, table.shape[1], mode=how.mode, align_corners=how.align_corners)
    flat = table.to(torch.promote_types(table.dtype, torch.float32)).flatten(0, 1)
    cells = torch.zeros((), dtype=flat.dtype, device=flat.device)
    for row, row_weight in zip(rows.unbind(-1), row_weights.unbind(-1)):
        for col, col_weight in zip(cols.unbind(-1), col_weights.unbind(-1)):
            weight = (row_weight * col_weight).to(flat.dtype)[..., None]
            cells = cells + F.embedding(row * table.shape[1] + col, flat) * weight
    return cells
