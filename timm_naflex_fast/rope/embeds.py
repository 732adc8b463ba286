"""Two computations of rotary embeddings, the sines and cosines of every token.

``per_token`` evaluates the formula for every token. It needs no host read, so compilers capture it,
but B*N*D sines cost more than writing them.

``per_cell`` computes each cell of the batch's distinct grids once, and a token takes its cell's
line. Where a cell has the same angles in every grid, there is one large grid. Mixed types have
learned frequencies for every block and head: their backward first sums the gradients of a cell's
tokens, then goes through the few hundred cells to the frequencies.

Each returns a function: the number of a mixed block -> (B, heads, N, 2D); None for other types ->
(B, 1, N, 2D). Blocks share no memory.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch.grids import grid_sizes_from_coord
from .modules import Rope

EmbedFn = Callable[[int | None], Tensor]


def sin_cos(angles: Tensor, rotate_half: bool) -> Tensor:
    """Angles (..., D/2) to D sines and D cosines (..., 2D), each twice: D/2 apart (``rotate_half``)
    or side by side."""
    values = torch.stack([angles.sin(), angles.cos()], -2)  # (..., 2, D/2)
    # Beside each other by stack: repeat_interleave takes twice as long.
    twice = (
        torch.cat([values, values], -1)
        if rotate_half
        else torch.stack([values, values], -1).flatten(-2)
    )
    return twice.flatten(-2)  # (..., 2, D) as (..., 2D)


def is_padding(coord: Tensor, size: Tensor) -> Tensor:
    """Which of the tokens (B, N, 2) come after the h*w tokens of their grid, (B, N); ``size`` (B,
    2) are the grids'."""
    return torch.arange(coord.shape[1], device=coord.device) >= size.prod(1, keepdim=True)


def per_token(rope: Rope, coord: Tensor, dtype: torch.dtype, padded: bool = True) -> EmbedFn:
    """Prepare the embeddings of the tokens (B, N, 2), int64, by the formula, with plain operations.

    ``padded``: whether some may be padding.
    """
    size = own_size = grid_sizes_from_coord(coord)  # (B, 2)
    if rope.scales_to_batch_max and rope.ref_feat_shape is not None and len(coord):
        size = size.amax(0, keepdim=True)
    positions = rope.positions(coord, size[:, None]).unsqueeze(1)  # (B, 1, N, 2)
    padding = is_padding(coord, own_size)[:, None, :, None]  # (B, 1, N, 1)

    def embeddings(block: int | None) -> Tensor:
        tokens = sin_cos(rope.angles(positions, block), rope.rotate_half).to(dtype)
        return tokens.masked_fill(padding, 0.0) if padded else tokens

    return embeddings


def per_cell(
    rope: Rope, coord: Tensor, dtype: torch.dtype, sizes: list[tuple[int, int]]
) -> EmbedFn:
    """Prepare the embeddings of the tokens (B, N, 2), int64: each takes the line of its cell.

    ``sizes``: for each sample (h, w), its grid or one that holds it.
    """
    distinct = list(dict.fromkeys(sizes))  # G grids, R cells together
    number = {size: n for n, size in enumerate(distinct)}
    size = _on_device(distinct, coord)  # (G, 2)
    grid = _on_device([number[size] for size in sizes], coord)  # (B,)

    count = sum(h * w for h, w in distinct)
    lengths = size.prod(1)
    grid_of_cell = torch.repeat_interleave(
        lengths, output_size=count
    )  # (R,); the host need not wait for the sum
    first_cell = lengths.cumsum(0) - lengths  # (G,)
    cell = torch.arange(count, device=coord.device) - first_cell[grid_of_cell]
    size_of_cell = size[grid_of_cell]  # (R, 2)
    cells = torch.stack([cell // size_of_cell[:, 1], cell % size_of_cell[:, 1]], 1)  # (R, 2)
    drawn = None
    if rope.augmentation is not None:
        drawn = draw(rope, len(distinct)).to(coord.device, non_blocking=True)[
            grid_of_cell
        ]  # (R, 3, 2)
    positions = rope.positions(cells, size_of_cell, drawn)  # (R, 2)

    # Each head has its R lines, then a line of zeros for padding.
    heads = torch.arange(
        rope.frequencies.shape[2] if rope.mixed else 1, dtype=torch.int32, device=coord.device
    )
    index = torch.addcmul(
        first_cell[grid][:, None] + coord[..., 1], coord[..., 0], size[grid, 1:]
    )  # (B, N)
    index = index.to(torch.int32).masked_fill(
        is_padding(coord, grid_sizes_from_coord(coord)), count
    )
    index = index[:, None] + heads[:, None] * (count + 1)  # (B, heads, N)

    def embeddings(block: int | None) -> Tensor:
        lines = sin_cos(rope.angles(positions, block), rope.rotate_half)  # ([heads,] R, 2D)
        lines = F.pad(lines, (0, 0, 0, 1)).flatten(0, -2)
        if lines.requires_grad:
            return F.embedding(index, lines).to(
                dtype
            )  # so that the gradients of a cell's tokens are added in float32
        return F.embedding(index, lines.to(dtype))

    return embeddings


def _on_device(numbers: list[Any], like: Tensor) -> Tensor:
    """Numbers of the host as int64 on the device of ``like``, for which the host does not wait."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(like.device, non_blocking=True)


def draw(rope: Rope, grids: int) -> Tensor:
    """Draw timm's random augmentation of each grid's positions, (grids, 3, 2): a shift and two
    factors.

    The draws have timm's order and are made where timm makes them, so a seed gives what it gives in
    timm.
    """
    assert rope.augmentation is not None
    shift, jitter, rescale = rope.augmentation

    device = None if rope.periods else rope.frequencies.device  # DINOv3 draws on the default device

    def uniform(count: int, limit: float | None) -> Tensor:
        """So many random numbers, or zeros where this one is off."""
        zeros = torch.zeros(count, device=device, dtype=torch.float32)
        return zeros if limit is None else zeros.uniform_(-limit, limit)

    drawn = []
    for _ in range(grids):
        moved = uniform(2, shift)
        stretched = uniform(2, jitter and math.log(jitter)).exp()
        scaled = uniform(1, rescale and math.log(rescale)).exp()
        drawn.append(torch.stack([moved, stretched, scaled.expand(2)]))
    return torch.stack(drawn)
