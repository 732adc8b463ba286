"""Three computations of rotary embeddings, the sines and cosines of every token.

``by_token`` evaluates the formula for every token. It needs no host read, so compilers capture it, but
B*N*D sines cost more than writing them. The two others compute fewer sines:

``by_cell`` computes each cell of the batch's grids once, and a token takes its cell's line. Where a cell has the same
angles in every grid, there is one large grid. Mixed types have learned frequencies for every block and head: their
backward first sums the gradients of a cell's tokens, then goes through the few hundred cells to the frequencies.

``by_line``: where angles depend on the grid's size (DINOv3), but each channel turns with one axis alone,
a grid has only h + w different lines: one per row and one per column, zero in the other axis' channels. A token's
entry is the sum of two.

Each returns a function: the number of a mixed block -> (B, heads, N, 2D); None for other types -> (B, 1, N, 2D).
Blocks share no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .grids import Grids, draw, padding, ragged
from .settings import Rope

EmbedFn = Callable[[int | None], Tensor]

CHUNK_BYTES = 2**25


def layout(angles: Tensor, rotate_half: bool) -> Tensor:
    """Angles (..., D/2) to D sines and D cosines (..., 2D), each twice: D/2 apart (``rotate_half``) or side by side."""
    values = torch.stack([angles.sin(), angles.cos()], -2)
    twice = values.unsqueeze(-2 if rotate_half else -1)
    shape = (*values.shape[:-1], 2, values.shape[-1]) if rotate_half else (*values.shape, 2)
    return twice.expand(shape).reshape(*angles.shape[:-1], 4 * angles.shape[-1])


def by_token(rope: Rope, coord: Tensor, dtype: torch.dtype, grids: Grids | None = None) -> EmbedFn:
    """Prepare the embeddings of the tokens (B, N, 2), int64, by the formula, with plain operations.

    Where ``grids`` were read, they tell whether there is padding, and which random change each grid draws.
    """
    size = coord.amax(1, keepdim=True) + 1
    if rope.largest and rope.reference is not None:
        size = size.amax(0, keepdim=True)
    change = None
    if grids is not None and rope.augment is not None:
        change = draw(rope, grids, _on_device(grids.of, coord)[:, None])
    positions = rope.positions(coord, size, change).unsqueeze(1)
    past = padding(coord)[:, None, :, None] if grids is None or grids.padded else None

    def embeddings(block: int | None) -> Tensor:
        out = layout(rope.angles(positions, block), rope.rotate_half).to(dtype)
        return out if past is None else out.masked_fill_(past, 0.0)

    return embeddings


def by_cell(rope: Rope, coord: Tensor, dtype: torch.dtype, grids: Grids) -> EmbedFn:
    """Prepare the embeddings of the tokens (B, N, 2): each token takes its cell's line."""
    sizes, of = _on_device(grids.sizes, coord), _on_device(grids.of, coord)
    grid_of, place, starts = ragged(sizes.prod(1), grids.cell_count)
    size = sizes[grid_of]
    places = torch.stack([place // size[:, 1], place % size[:, 1]], 1)
    positions = rope.positions(places, size, draw(rope, grids, grid_of))
    cell = torch.addcmul(starts[of][:, None] + coord[..., 1], coord[..., 0], sizes[:, 1][of][:, None])
    cell, past, count = cell.to(torch.int32), padding(coord), len(place)
    if not rope.mixed:
        lines = F.pad(layout(rope.angles(positions), rope.rotate_half), (0, 0, 0, 1)).to(dtype)  # the last, for padding
        tokens = F.embedding(cell.masked_fill_(past, count), lines).unsqueeze(1)
        return lambda _: tokens
    # One line per head and cell, then a line of zeros for padding.
    heads = rope.frequencies.shape[2]
    index = cell[:, None] + torch.arange(heads, dtype=torch.int32, device=cell.device)[:, None] * count
    index.masked_fill_(past[:, None], heads * count)
    return lambda block: _Spread.apply(
        layout(rope.angles(positions, block), rope.rotate_half).flatten(0, 1), index, dtype
    )


def by_line(rope: Rope, coord: Tensor, dtype: torch.dtype, grids: Grids) -> EmbedFn:
    """Prepare the embeddings of the tokens (B, N, 2): each token adds up its row's and its column's line."""
    sizes, of = _on_device(grids.sizes, coord), _on_device(grids.of, coord)
    # All grids' rows, then all grids' columns.
    line_of, place, starts = ragged(sizes.t().flatten(), sum(map(sum, grids.sizes)))
    axis, grid_of = line_of // len(sizes), line_of % len(sizes)
    positions = rope.positions(F.one_hot(axis, 2) * place[:, None], sizes[grid_of], draw(rope, grids, grid_of))
    # Channels that neither position turns, mrope's temporal ones, go with the first position.
    second = rope.angles(torch.arange(2, dtype=torch.float32, device=coord.device)) != 0  # of the position (0, 1)
    mask = torch.stack([second, ~second] if rope.xy_order else [~second, second]).float()  # (axis, channel)
    mask = (mask.repeat(1, 2) if rope.rotate_half else mask.repeat_interleave(2, 1)).repeat(1, 2)
    lines = layout(rope.angles(positions), rope.rotate_half) * mask[axis]
    index = (coord + starts.view(2, -1).t()[of][:, None]).to(torch.int32)
    index.masked_fill_(padding(coord)[..., None], len(lines))
    lines = F.pad(lines, (0, 0, 0, 1)).to(dtype)  # the last line, for padding
    tokens = F.embedding_bag(index.flatten(0, 1), lines, mode="sum")
    return lambda _: tokens.view(len(coord), 1, -1, lines.shape[1])


def _on_device(numbers: Sequence[Any], like: Tensor) -> Tensor:
    """Numbers of the host as int64 on the device of ``like``, for which the host does not wait."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(like.device, non_blocking=True)


class _Spread(torch.autograd.Function):
    """Lines (R, C) to tokens (B, ..., C) in ``dtype``; the index R gives zeros."""

    @staticmethod
    def forward(ctx: Any, lines: Tensor, index: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows, ctx.dtype = len(lines), lines.dtype
        return F.embedding(index, F.pad(lines, (0, 0, 0, 1)).to(dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (index,) = ctx.saved_tensors
        return collect(grads[0], index, ctx.rows, ctx.dtype), None, None


def collect(tokens: Tensor, index: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """The sum of the tokens (B, ..., C) that take each of ``rows`` lines, (rows, C), added up in ``dtype``."""
    # Tokens in another dtype are copied into a wider one, a few samples at a time.
    whole = tokens.numel() * (tokens.dtype != dtype) * 8
    samples = max(1, len(tokens) * CHUNK_BYTES // max(whole, CHUNK_BYTES))
    lines = tokens.new_zeros(rows + 1, tokens.shape[-1], dtype=dtype)
    for part, where in zip(tokens.split(samples), index.split(samples)):
        lines = lines + torch.ops.aten.embedding_dense_backward(part.to(dtype), where, rows + 1, rows, False)
    return lines[:rows]
