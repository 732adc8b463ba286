"""The grids of a batch, and the random change of their positions that timm draws in training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..resampling.grids import read_grids
from .settings import Rope


@dataclass(frozen=True)
class Grids:
    """The distinct grids of a batch in order of first appearance, or one grid that holds all of them.

    Args:
        sizes: height and width of each grid.
        of: for each sample, the number of its grid.
        cell_count: how many cells the grids have together.
        padded: whether the batch holds any padding.
    """

    sizes: list[tuple[int, int]]
    of: list[int]
    cell_count: int
    padded: bool


def padding(coord: Tensor) -> Tensor:
    """Which of the tokens (B, N, 2) are padding, (B, N): those past the h*w tokens of their grid."""
    cells = (coord.amax(1, keepdim=True) + 1).prod(2)
    return torch.arange(coord.shape[1], device=coord.device) >= cells


def grids_on_host(coord: Tensor, *, one: bool) -> Grids:
    """Read the grids of the tokens (B, N, 2), B and N at least 1, back to the host.

    Args:
        coord: int64 coordinates (y, x). Those of padding may hold anything up to their grid's size.
        one: return a single grid, as high and as wide as the largest.

    Raises:
        ValueError: a negative, non-finite or huge coordinate among a grid's own tokens.
    """
    found = read_grids(coord)  # the only device-to-host copy
    number: dict[tuple[int, int], int] = {}
    of = [number.setdefault(size, len(number)) for size in zip(found.h.tolist(), found.w.tolist())]
    padded = any(h * w < coord.shape[1] for h, w in number)
    if one:
        number, of = {(max(h for h, _ in number), max(w for _, w in number)): 0}, [0] * len(of)
    return Grids(list(number), of, sum(h * w for h, w in number), padded)


def ragged(lengths: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Number the items of sequences of ``lengths`` (G,), ``total`` together, that lie end to end.

    Returns:
        Each item's sequence and its place in there, both (total,), and each sequence's first item, (G,).
    """
    sequence = torch.repeat_interleave(lengths, output_size=total)  # named, so that the host need not wait for it
    starts = lengths.cumsum(0) - lengths
    return sequence, torch.arange(total, device=lengths.device) - starts[sequence], starts


def draw(rope: Rope, grids: Grids, grid_of: Tensor) -> Tensor | None:
    """Draw timm's random change of positions for each grid: a shift and two factors; None if it is off.

    The draws have timm's order and are made where timm makes them, so a seed gives what it gives in timm.

    Returns:
        (..., 3, 2), what was drawn for the grids with the numbers ``grid_of`` (...), on its device.
    """
    if rope.augment is None:
        return None
    shift, jitter, rescale = rope.augment

    def uniform(count: int, limit: float | None) -> Tensor:
        """So many random numbers, or zeros where this change is off."""
        zeros = torch.zeros(count, device=rope.augment_device, dtype=torch.float32)
        return zeros if limit is None else zeros.uniform_(-limit, limit)

    drawn = []
    for _ in grids.sizes:
        moved = uniform(2, shift)
        stretched = uniform(2, jitter and math.log(jitter)).exp()
        scaled = uniform(1, rescale and math.log(rescale)).exp()
        drawn.append(torch.stack([moved, stretched, scaled.expand(2)]))
    return torch.stack(drawn).to(grid_of.device, non_blocking=True)[grid_of]
