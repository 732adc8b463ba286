"""A few tokens in a huge grid, as after dropping most, or by one wrong coordinate: only the cells they name.

Memory is linear in tokens (times the table's cells), whatever the coordinates; speed is not the aim here. The weights
are PyTorch's in closed form (weights.py); the sums are float64, which neither autocast nor TF32 touches.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backends import exported as matmul_traceable
from ..backends.closed_form import axis_weights
from .grids import Group, too_many
from .matrices import Resampling

CHUNK = 2**20  # weights at a time


def add_learned(x: Tensor, table: Tensor, groups: list[Group], how: Resampling) -> list[Group]:
    """Add the table ([1,] H0, W0, C), resampled, to the tokens of ``x`` in scattered groups, in place.

    Returns:
        The other groups, which are left to do.
    """
    left, scattered = _split(groups, how)
    for group, y, x_ in scattered:
        cells = _learned_cells(table.reshape(table.shape[-3:]), group, y, x_, how)
        x[group.samples[0], : group.tokens].add_(cells.to(x.dtype))
    return left


def add_factorized(
    x: Tensor, table_y: Tensor, table_x: Tensor, groups: list[Group], ar_preserving: bool
) -> list[Group]:
    """The same with ``y + x`` of the tables ([1,] H0, C) and ([1,] W0, C)."""
    left, scattered = _split(groups, Resampling(ar_preserving=ar_preserving))
    for group, y, x_ in scattered:
        (sample,) = group.samples
        tokens = x[sample : sample + 1, : group.tokens]
        matmul_traceable.add_factorized(tokens, table_y, table_x, torch.stack((y, x_), -1)[None], ar_preserving)
    return left


def _split(groups: list[Group], how: Resampling) -> tuple[list[Group], list[tuple[Group, Tensor, Tensor]]]:
    """The groups to compute whole, and the scattered ones with their tokens' y and x.

    Row-major samples, whose groups come first, are never among them: their last token is in the grid's last row.
    """
    left, found = [], []
    for group in reversed(groups):
        if group.cells is None:
            break
        if too_many(math.prod(how.lengths(group.h, group.w)), group.tokens):
            found.append((group, group.cells // group.w, group.cells % group.w))
        else:
            left.append(group)
    if not found:
        return groups, found
    return groups[: len(groups) - len(left) - len(found)] + left, found


def _learned_cells(table: Tensor, group: Group, y: Tensor, x: Tensor, how: Resampling) -> Tensor:
    """The embeddings (tokens, C) of the cells (y, x) of a group's grid."""
    rows, cols = table.shape[:2]
    if (group.h, group.w) == (rows, cols):
        return F.embedding(y * cols + x, table.flatten(0, 1))
    flat = table.float().double().flatten(0, 1)
    lengths = [y.new_tensor(n) for n in how.lengths(group.h, group.w)]
    parts = []
    for part_y, part_x in zip(y.split(max(1, CHUNK // len(flat))), x.split(max(1, CHUNK // len(flat)))):
        along_y, along_x = (
            axis_weights(at, n, n0, mode=how.mode, antialias=how.antialias, align_corners=how.align_corners)
            for at, n, n0 in zip((part_y, part_x), lengths, (rows, cols))
        )
        parts.append((along_y[:, :, None] * along_x[:, None]).flatten(1) @ flat)
    return torch.cat(parts).float()
