"""The rotary tables of a batch, by whichever computation costs least."""

from __future__ import annotations

import torch
from torch import Tensor

from ..resampling.grids import whole_numbers
from .grids import read_grids
from .mixed import MixedTables, by_block
from .settings import Rope
from .tables import by_cell, by_line, by_token

FEW_TOKENS = 1024


def too_many(cells: int, tokens: int) -> bool:
    """Whether all ``cells`` of the grids could take memory out of proportion to the ``tokens``."""
    return cells > max(16 * tokens, 4096)


def batched_rope(
    rope: Rope, patch_coord: Tensor, dtype: torch.dtype, *, in_graph: bool = False
) -> Tensor | MixedTables | list[Tensor]:
    """What timm's ``NaFlexVit._generate_rope_naflex`` returns, without a loop over samples.

    Args:
        rope: the module's settings, from :func:`read_rope`.
        patch_coord: (B, N, 2) coordinates (y, x) of the patch tokens, in any number dtype. A sample's grid is its
            largest coordinate + 1; tokens past its h*w are padding, whose coordinates are not looked at.
        dtype: of the result. Angles, sines and cosines are computed in float32 at least, under autocast too.
        in_graph: use PyTorch's differentiable, capturable operations alone, and read nothing back to the host.

    Returns:
        (B, 1, N, 2D), D the head's width: sines, then cosines, zeros at padding. For mixed rotary embeddings an
        iterable of (B, heads, N, 2D), one per block.

    Raises:
        ValueError: a negative, non-finite or huge coordinate of a token that is no padding. Not checked with
            ``in_graph``, nor on a GPU where nothing is read back.

    Source: ``timm.models.naflexvit.NaFlexVit._generate_rope_naflex``.
    """
    depth = rope.frequencies.shape[1] if rope.mixed else 0
    if in_graph:
        table = by_token(rope, patch_coord.detach().to(torch.int64), dtype)
        return [table(block) for block in range(depth)] if rope.mixed else table(None)
    coord = whole_numbers(patch_coord)
    batch, length = coord.shape[:2]
    fixed = rope.augment is None
    if coord.numel() == 0 or (coord.is_cuda and fixed and not rope.mixed):
        grids, formula = None, True  # on a GPU sines are free and host reads are not
    else:
        grids = read_grids(coord, one=rope.alike)
        # Other reasons for the formula: one sample has each cell once; few tokens need few operations; one token with
        # a huge coordinate makes a huge grid.
        few = batch == 1 if rope.mixed else batch * length <= FEW_TOKENS
        formula = (few and fixed) or too_many(grids.cells, batch * length)
    if formula or grids is None:
        table = by_token(rope, coord, dtype, grids)
        return MixedTables(depth, table) if rope.mixed else table(None)
    if rope.mixed:
        return MixedTables(depth, by_block(rope, coord, dtype, grids))
    return (by_cell if rope.alike else by_line)(rope, coord, dtype, grids)
