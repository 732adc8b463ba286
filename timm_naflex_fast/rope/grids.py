"""A batch's grids, read back to the host once, and what is drawn at random for each of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..resampling.grids import LARGEST, bad_coordinate
from .settings import Rope


@dataclass(frozen=True)
class Grids:
    """The distinct grids of a batch in order of first appearance, or one as large as the largest of each side.

    Args:
        coord: (B, N, 2) the tokens' (y, x), int64.
        sizes: (G, 2) grids (h, w), int64.
        of: (B,) which of them is each sample's, int64.
        past: (B, N) whether a token lies past the end of its sample's grid, and so is padding.
        cells: how many cells ``sizes`` have together.
    """

    coord: Tensor
    sizes: Tensor
    of: Tensor
    past: Tensor
    cells: int


def read_grids(coord: Tensor, *, one: bool) -> Grids:
    """The grids of the tokens (B, N, 2), B and N at least 1; with ``one``, a single grid that holds every other.

    Raises:
        ValueError: a negative, non-finite or huge coordinate.
    """
    size = coord.amax(1) + 1
    past = torch.arange(coord.shape[1], device=coord.device) >= size.prod(1, keepdim=True)
    facts = torch.cat([size, coord.amin((1, 2))[:, None]], 1).tolist()  # the device-to-host copy
    for sample, (h, w, lowest) in enumerate(facts):
        if lowest < 0 or max(h, w) > LARGEST:
            raise bad_coordinate(sample)
    number: dict[tuple[int, int], int] = {}
    of = [number.setdefault((h, w), len(number)) for h, w, _ in facts]
    if one:
        cells = max(h for h, _ in number) * max(w for _, w in number)
        return Grids(coord, size.amax(0, keepdim=True), size.new_zeros(len(size)), past, cells)
    cells = sum(h * w for h, w in number)
    return Grids(coord, size.new_tensor(list(number)), size.new_tensor(of), past, cells)


def ragged(lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences of ``lengths`` (G,) laid end to end: each item's sequence and place in it, and where each starts."""
    if len(lengths) == 1:
        place = torch.arange(int(lengths), device=lengths.device)
        return torch.zeros_like(place), place, torch.zeros_like(lengths)
    owner = torch.repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    return owner, torch.arange(len(owner), device=lengths.device) - starts[owner], starts


def cells(rope: Rope, grids: Grids) -> tuple[Tensor, Tensor]:
    """Positions (cells, 2) of all cells of the grids, and the cell of each token, (B, N) int32."""
    owner, place, starts = ragged(grids.sizes.prod(1))
    size = grids.sizes[owner]
    positions = rope.positions(torch.stack([place // size[:, 1], place % size[:, 1]], 1), size)
    width = grids.sizes[:, 1][grids.of][:, None]
    index = torch.addcmul(starts[grids.of][:, None] + grids.coord[..., 1], grids.coord[..., 0], width)
    return augmented(rope, grids)(positions, owner, slice(None)), index.to(torch.int32)


def augmented(rope: Rope, grids: Grids) -> Callable[[Tensor, Tensor, slice], Tensor]:
    """The training-time change of positions: (positions (..., A), the grid of each (...), their channels) -> new ones.

    Drawn for one grid after the other in timm's order and on its device, so that a seed gives what it gives in timm.
    """
    if rope.augment is None:
        return lambda positions, owner, channels: positions
    shift, jitter, rescale = rope.augment

    def draw(count: int, limit: float) -> Tensor:
        return torch.empty(count, device=rope.augment_device, dtype=torch.float32).uniform_(-limit, limit)

    drawn = []
    for _ in range(len(grids.sizes)):
        moved = draw(2, float(shift)) if shift is not None else torch.zeros(2)
        stretched = draw(2, math.log(jitter)).exp() if jitter is not None else torch.ones(2)
        scaled = draw(1, math.log(rescale)).exp() if rescale is not None else torch.ones(1)
        drawn.append(torch.cat([moved, stretched, scaled.expand(2)]).view(3, 2))
    by_grid = torch.stack(drawn).to(grids.coord.device)

    def change(positions: Tensor, owner: Tensor, channels: slice) -> Tensor:
        moved, stretched, scaled = by_grid[owner][..., channels].unbind(-2)
        return (positions + moved) * stretched * scaled

    return change
