"""One vectorised ``F.grid_sample`` for the whole batch, straight from the coordinates: fast, but not timm's default.

There is no antialiasing, so wherever a grid is smaller than the table the result drifts from ``F.interpolate``.
It equals timm's own ``pos_embed_use_grid_sample=True``, which adds to padding tokens too. A learned table needs no
device sync; a factorized one, like older timm's positions, reads the batch's largest grid back once, as timm does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .grids import LARGEST, bad_coordinate, too_many, whole_numbers
from .matrices import Resampling


def add_learned(
    x: Tensor,
    table: Tensor,
    patch_coord: Tensor,
    how: Resampling,
    *,
    padding_mode: str = "border",
    dense_positions: bool = False,
) -> None:
    """Sample the table ([1,] H0, W0, C) at each token's position and add it into ``x`` (B, N, C) in place.

    Args:
        x: (B, N, C) tokens.
        table: ([1,] H0, W0, C), used in float32.
        patch_coord: (B, N, 2) coordinates (y, x).
        how: ``mode``, ``align_corners`` and ``ar_preserving`` are used; there is no antialiasing to be had.
        padding_mode: ``"border"`` as in timm, or ``"zeros"`` as in timm issue 2514.
        dense_positions: take the positions from ``F.affine_grid`` over the batch's largest grid, as timm issue 2514
            and older timm do (the same points, other rounding; reads two sizes back from the device).
    """
    if x.shape[1] == 0 or (dense_positions and x.shape[0] == 0):
        return
    if dense_positions:
        positions = _affine_positions(patch_coord, how)
    else:
        positions = _token_positions(patch_coord, how)
    sampled = F.grid_sample(
        table.reshape(1, *table.shape[-3:]).permute(0, 3, 1, 2).expand(len(x), -1, -1, -1).float(),
        positions.flip(-1)[:, :, None],  # grid_sample wants (x, y)
        mode=how.mode,
        padding_mode=padding_mode,
        align_corners=how.align_corners,
    )
    x.add_(sampled[..., 0].transpose(1, 2).to(x.dtype))


def add_factorized(
    x: Tensor, table_y: Tensor, table_x: Tensor, patch_coord: Tensor, ar_preserving: bool = False
) -> None:
    """Sample the tables ([1,] H0, C) and ([1,] W0, C) at each token; add ``y + x`` into ``x`` in place."""
    if x.shape[0] == 0 or x.shape[1] == 0:
        return
    positions = _affine_positions(patch_coord, Resampling(ar_preserving=ar_preserving))
    parts = []
    for table, position in zip((table_y, table_x), positions.unbind(-1)):
        line = table.reshape(table.shape[-2:]).t()[None, :, None].expand(len(x), -1, -1, -1).float()  # (B, C, 1, L)
        at = torch.stack((position, torch.zeros_like(position)), -1)[:, None]  # (B, 1, N, 2)
        sampled = F.grid_sample(line, at, mode="bilinear", padding_mode="border", align_corners=False)
        parts.append(sampled[:, :, 0].transpose(1, 2).to(x.dtype))
    x.add_(parts[1] + parts[0])


def _shapes(patch_coord: Tensor, how: Resampling) -> Tensor:
    """Per sample the size (2,) that the table is spread over."""
    shapes = patch_coord.amax(1) + 1
    return shapes.amax(1, keepdim=True).expand_as(shapes) if how.ar_preserving else shapes


def _token_positions(patch_coord: Tensor, how: Resampling) -> Tensor:
    """Positions in [-1, 1] of each token, (B, N, 2) as (y, x), in timm's own order of float32 operations."""
    shapes = _shapes(patch_coord, how)[:, None]
    coord = patch_coord.float()
    if how.align_corners:
        return 2.0 * coord / (shapes - 1).clamp(min=1) - 1.0
    return (2.0 * coord + 1.0) / shapes - 1.0


def _affine_positions(patch_coord: Tensor, how: Resampling) -> Tensor:
    """The same positions picked from an affine grid over the batch's largest grid.

    Raises:
        ValueError: a negative or non-finite coordinate, or one too large to count.
    """
    shapes = _shapes(patch_coord, how)
    largest = shapes.amax(0)
    whole = whole_numbers(patch_coord)
    facts = torch.cat((whole.amin((1, 2)), whole.amax((1, 2)))).view(2, -1).t().tolist()
    for number, (lowest, highest) in enumerate(facts):
        if lowest < 0 or highest > LARGEST:
            raise bad_coordinate(number)
    zoom = (largest / shapes).float()
    rows, cols = (int(n) for n in largest.tolist())
    if too_many(rows * cols, patch_coord.shape[1]):
        return _token_positions(whole, how)
    theta = torch.zeros(len(zoom), 2, 3, dtype=torch.float32, device=zoom.device)
    theta[:, 0, 0], theta[:, 0, 2] = zoom[:, 1], zoom[:, 1] - 1
    theta[:, 1, 1], theta[:, 1, 2] = zoom[:, 0], zoom[:, 0] - 1
    grid = F.affine_grid(theta, [len(zoom), 1, rows, cols], align_corners=how.align_corners)
    sample = torch.arange(len(zoom), device=zoom.device)[:, None]
    y, x = whole.unbind(-1)
    return grid[sample, y, x].flip(-1)
