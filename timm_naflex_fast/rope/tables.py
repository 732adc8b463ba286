"""Three computations of a table of sines and cosines.

``by_token`` evaluates the formula for every token. It needs no host read, so compilers capture it, but
B*N*D sines cost more than writing the table. The two others compute fewer sines:

``by_cell``: where a cell has the same angles in every grid, compute the cells of one large grid; a token takes its
cell's line. ``by_line``: where angles depend on the grid's size (DINOv3), but each channel turns with one axis alone,
a grid has only h + w different lines: one per row and one per column, zero in the other axis' channels. A token's
entry is the sum of two.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .grids import Grids, augmentation, cells, padding, ragged
from .settings import Rope


def layout(angles: Tensor, half: bool) -> Tensor:
    """Angles (..., D/2) to D sines and D cosines (..., 2D), each angle twice: D/2 apart (``half``) or side by side."""
    values = torch.stack([angles.sin(), angles.cos()], -2)
    twice = values.unsqueeze(-2 if half else -1)
    shape = (*values.shape[:-1], 2, values.shape[-1]) if half else (*values.shape, 2)
    return twice.expand(shape).reshape(*angles.shape[:-1], 4 * angles.shape[-1])


def by_token(
    rope: Rope, coord: Tensor, dtype: torch.dtype, grids: Grids | None = None
) -> Callable[[int | None], Tensor]:
    """Prepare the tables of the tokens (B, N, 2) by the formula, with plain operations.

    Args:
        rope: the module's settings.
        coord: (B, N, 2) int64.
        dtype: of the tables.
        grids: where they were read, they tell whether there is padding, and which random change each grid draws.

    Returns:
        A function: the number of a mixed block -> (B, heads, N, 2D); None for other types -> (B, 1, N, 2D).
    """
    size = coord.amax(1, keepdim=True) + 1
    if rope.largest and rope.reference is not None:
        size = size.amax(0, keepdim=True)
    positions = rope.positions(coord, size)
    if grids is not None and rope.augment is not None:
        owner = coord.new_tensor(grids.of)[:, None].expand(coord.shape[:2])
        positions = augmentation(rope, grids, coord.device)(positions, owner)
    positions = positions.unsqueeze(1)
    past = padding(coord)[:, None, :, None] if grids is None or grids.padded else None

    def table(block: int | None) -> Tensor:
        out = layout(rope.angles(positions, block), rope.half).to(dtype)
        return out if past is None else out.masked_fill_(past, 0.0)

    return table


def by_cell(rope: Rope, coord: Tensor, dtype: torch.dtype, grids: Grids) -> Tensor:
    """The tables (B, 1, N, 2D) of the tokens (B, N, 2): each token takes its cell's line."""
    positions, index = cells(rope, coord, grids)
    table = F.pad(layout(rope.angles(positions), rope.half), (0, 0, 0, 1)).to(dtype)  # the last line, for padding
    return F.embedding(index.masked_fill_(padding(coord), len(table) - 1), table).unsqueeze(1)


def by_line(rope: Rope, coord: Tensor, dtype: torch.dtype, grids: Grids) -> Tensor:
    """The tables (B, 1, N, 2D) of the tokens (B, N, 2): each token adds up its row's and its column's line."""
    change = augmentation(rope, grids, coord.device)
    turned_by_second = rope.angles(torch.tensor([0.0, 1.0], device=coord.device)) != 0
    sizes, of, lines, index, start = coord.new_tensor(grids.sizes), coord.new_tensor(grids.of), [], [], 0
    for axis in (0, 1):
        owner, place, starts = ragged(sizes[:, axis])
        zero = torch.zeros_like(place)
        places = torch.stack([zero, place] if axis else [place, zero], 1)
        positions = change(rope.positions(places, sizes[owner]), owner)
        # Channels that neither position turns, mrope's temporal ones, go with the first position.
        mine = turned_by_second if axis ^ rope.swap else ~turned_by_second
        mine = (mine.repeat(2) if rope.half else mine.repeat_interleave(2)).repeat(2)
        lines.append(layout(rope.angles(positions), rope.half) * mine)
        index.append(coord[..., axis] + (starts[of] + start)[:, None])
        start += len(place)
    table = F.pad(torch.cat(lines), (0, 0, 0, 1)).to(dtype)  # the last line, for padding
    both = torch.stack(index, 2).to(torch.int32).masked_fill_(padding(coord)[..., None], start)
    return sum_of_lines(table, both).unsqueeze(1)


def sum_of_lines(table: Tensor, index: Tensor) -> Tensor:
    """The sum over k of the lines ``table[index[..., k]]``, (..., C)."""
    return F.embedding_bag(index.flatten(0, -2), table, mode="sum").view(*index.shape[:-1], table.shape[1])
