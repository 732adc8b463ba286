"""Two computations of rotary embeddings, the sines and cosines of every token.

``per_token`` evaluates the formula for every token. It needs no host read, so compilers capture
it, but B*N*D sines cost more than writing them.

``per_cell`` computes each cell of the batch's distinct grids once, and a token takes its cell's
line. Where a cell has the same angles in every grid, there is one large grid. Mixed types have
learned frequencies for every block and head: their backward first sums the gradients of a cell's
tokens, then goes through the few hundred cells to the frequencies.

Each returns a function: the number of a mixed block -> (B, heads, N, 2D); None for other types ->
(B, 1, N, 2D). Blocks share no memory.

``tests/rope/test_batched.py`` compares both with timm.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..batch.grids import grid_sizes_from_coord
from .modules import Rope

EmbedFn = Callable[[int | None], Tensor]


def sin_cos(angles: Tensor, rotate_half: bool) -> Tensor:
    """Angles (..., D/2) to D sines and D cosines (..., 2D).

    Each stands there twice: D/2 apart (``rotate_half``), or side by side.
    """
    values = torch.stack([angles.sin(), angles.cos()], -2)  # (..., 2, D/2)
    if rotate_half:
        twice = torch.cat([values, values], -1)  # (..., 2, D)
    else:
        # repeat_interleave takes twice as long.
        twice = torch.stack([values, values], -1).flatten(-2)  # (..., 2, D)
    return twice.flatten(-2)


def is_padding(coord: Tensor, size: Tensor) -> Tensor:
    """Which of the tokens (B, N, 2) come after the h*w tokens of their grid, (B, N).

    ``size``: (B, 2) sizes (h, w) of the samples' grids.
    """
    return torch.arange(coord.shape[1], device=coord.device) >= size.prod(1, keepdim=True)


def per_token(
    rope: Rope, coord: Tensor, dtype: torch.dtype, *, has_padding: bool = True
) -> EmbedFn:
    """Prepare the embeddings of the tokens (B, N, 2), int64, by the formula.

    ``has_padding``: False where it is known that no token is padding.
    """
    size = grid_sizes_from_coord(coord)  # (B, 2)
    padding = is_padding(coord, size)[:, None, :, None]  # (B, 1, N, 1)
    positions = rope.positions(coord, size[:, None]).unsqueeze(1)  # (B, 1, N, 2)

    def embeddings(block: int | None) -> Tensor:
        tokens = sin_cos(rope.angles(positions, block), rope.rotate_half).to(dtype)
        if has_padding:
            tokens = tokens.masked_fill(padding, 0.0)
        return tokens

    return embeddings


def per_cell(
    rope: Rope, coord: Tensor, dtype: torch.dtype, sizes: list[tuple[int, int]]
) -> EmbedFn:
    """Prepare the embeddings of the tokens (B, N, 2), int64: each takes the line of its cell.

    ``sizes``: for each sample (h, w), its grid or one that holds it.
    """
    distinct = list(dict.fromkeys(sizes))
    cell_count = sum(h * w for h, w in distinct)
    grid_sizes = _on_device(distinct, coord)  # (G, 2)
    lengths = grid_sizes.prod(1)  # (G,)
    first_cells = lengths.cumsum(0) - lengths  # (G,)

    # The cells of all grids, one grid after the other. Told the number of cells, the host need not
    # wait for their sum.
    grid = torch.repeat_interleave(lengths, output_size=cell_count)  # (R,)
    cell = torch.arange(cell_count, device=coord.device) - first_cells[grid]  # (R,)
    width = grid_sizes[grid, 1]  # (R,)
    cells = torch.stack([cell // width, cell % width], 1)  # (R, 2)
    positions = rope.positions(cells, grid_sizes[grid])  # (R, 2)

    # Each head has its own cells, and after them a line of zeros, which is padding's.
    number = {size: n for n, size in enumerate(distinct)}
    grid_of_sample = _on_device([number[size] for size in sizes], coord)  # (B,)
    first = first_cells[grid_of_sample, None]  # (B, 1)
    y, x = coord.unbind(-1)  # (B, N) each
    line = (first + y * grid_sizes[grid_of_sample, 1:] + x).to(torch.int32)
    line = line.masked_fill(is_padding(coord, grid_sizes_from_coord(coord)), cell_count)  # (B, N)
    head_count = rope.frequencies.shape[2] if rope.mixed else 1
    heads = torch.arange(head_count, dtype=torch.int32, device=coord.device)
    index = line[:, None] + heads[:, None] * (cell_count + 1)  # (B, heads, N)

    def embeddings(block: int | None) -> Tensor:
        lines = sin_cos(rope.angles(positions, block), rope.rotate_half)  # ([heads,] R, 2D)
        lines = F.pad(lines, (0, 0, 0, 1)).flatten(0, -2)
        # With a gradient the cast comes last: so a cell's gradients are added in float32.
        if not lines.requires_grad:
            lines = lines.to(dtype)
        return F.embedding(index, lines).to(dtype)

    return embeddings


def _on_device(numbers: list[Any], like: Tensor) -> Tensor:
    """Numbers of the host as int64 beside ``like``; the host does not wait for the copy."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(like.device, non_blocking=True)
