"""Tables (B, 1, N, 2D) of sines and cosines, for the types in which each channel turns with one axis.

One formula, evaluated where it costs least. ``closed``: for every token; nothing is read back to the host, so it
captures. ``gathered``: B . N . D sines cost more than writing them down, so where a cell has the same angles in every
grid, for the cells of the largest one, from which each token takes its own; and where not (DINOv3's depend on the
grid's size), for the rows and the columns of the grids, of which each token adds up two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .grids import Grids, augmented, cells, ragged
from .settings import Rope


def layout(angles: Tensor, half: bool) -> Tensor:
    """Angles (..., D/2) to sines and then cosines (..., 2D), each angle twice: D/2 apart (``half``) or side by side."""
    values = torch.stack([angles.sin(), angles.cos()], -2)
    twice = values.unsqueeze(-2 if half else -1)
    shape = (*values.shape[:-1], 2, values.shape[-1]) if half else (*values.shape, 2)
    return twice.expand(shape).reshape(*angles.shape[:-1], 4 * angles.shape[-1])


def token_positions(rope: Rope, coord: Tensor, grids: Grids | None = None) -> tuple[Tensor, Tensor]:
    """Positions (B, N, 2) of the tokens (B, N, 2), and which are past the end of their grid, (B, N, 1).

    With their ``grids``, changed as they draw it at random.
    """
    grid = coord.amax(1, keepdim=True) + 1
    past = torch.arange(coord.shape[1], device=coord.device)[:, None] >= grid.prod(2, keepdim=True)
    if rope.largest and rope.reference is not None:
        grid = grid.amax(0, keepdim=True)
    positions = rope.positions(coord, grid)
    if grids is not None:
        positions = augmented(rope, grids)(positions, grids.of[:, None].expand(coord.shape[:2]), slice(None))
    return positions, past


def closed(rope: Rope, coord: Tensor, dtype: torch.dtype, grids: Grids | None = None, *, look: bool) -> Tensor:
    """Tables (B, 1, N, 2D) for the tokens (B, N, 2), zero past the end of a grid, by the formula per token.

    ``grids``: change the positions as these draw it at random. ``look``: read back whether there is padding at all,
    and leave out the pass that clears it if not.
    """
    positions, past = token_positions(rope, coord, grids)
    tables = layout(rope.angles(positions), rope.half).to(dtype)
    return (tables if look and not past.any() else tables.masked_fill_(past, 0.0)).unsqueeze(1)


def gathered(rope: Rope, grids: Grids, dtype: torch.dtype) -> Tensor:
    """Tables (B, 1, N, 2D) for the tokens of ``grids``, from a table of cells or of rows and columns."""
    if rope.alike:
        positions, index = cells(rope, grids)
        table = F.pad(layout(rope.angles(positions), rope.half), (0, 0, 0, 1)).to(dtype)  # a line of zeros for padding
        # Not embedding_bag, which is a little faster: it keeps some bytes per token, and timm's peak is as low as this.
        return F.embedding(index.masked_fill_(grids.past, len(table) - 1), table).unsqueeze(1)
    table, index = _lines(rope, grids)
    table = F.pad(table, (0, 0, 0, 1)).to(dtype)
    return sum_of_lines(table, index.masked_fill_(grids.past[..., None], len(table) - 1)).unsqueeze(1)


def _lines(rope: Rope, grids: Grids) -> tuple[Tensor, Tensor]:
    """A line per row and per column of each grid, zero in the other axis' channels, and each token's two (B, N, 2)."""
    by_second = rope.angles(torch.tensor([0.0, 1.0], device=rope.frequencies.device)) != 0
    change = augmented(rope, grids)
    lines, index, start = [], [], 0
    for axis in (0, 1):
        channel = axis ^ rope.swap
        owner, place, starts = ragged(grids.sizes[:, axis])
        position = rope.positions(place[:, None], grids.sizes[owner], slice(axis, axis + 1))
        position = change(position, owner, slice(channel, channel + 1))
        mine = by_second if channel else ~by_second  # angles that neither turns, mrope's temporal ones, go to the first
        mine = (mine.repeat(2) if rope.half else mine.repeat_interleave(2)).repeat(2)
        lines.append(layout(rope.angles(F.pad(position, (channel, 1 - channel))), rope.half) * mine)
        index.append((starts[grids.of] + start).to(torch.int32)[:, None] + grids.coord[..., axis].to(torch.int32))
        start += len(place)
    return torch.cat(lines), torch.stack(index, 2)


def sum_of_lines(table: Tensor, index: Tensor) -> Tensor:
    """The sum over k of the lines ``table[index[..., k]]``, (..., C), written once."""
    return F.embedding_bag(index.flatten(0, -2), table, mode="sum").view(*index.shape[:-1], table.shape[1])
