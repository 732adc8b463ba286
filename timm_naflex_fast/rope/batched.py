"""Which form of the rotary tables serves a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..resampling.grids import bad_coordinate, whole_numbers
from .grids import read_grids
from .mixed import MixedTables, mixed_closed, mixed_gathered
from .settings import Rope
from .tables import closed, gathered

FEW_TOKENS = 1024


def too_many(cells: int, tokens: int) -> bool:
    """Whether to compute all ``cells`` of a grid could take memory beyond all proportion to its ``tokens``."""
    return cells > max(16 * tokens, 4096)


def batched_rope(
    rope: Rope, patch_coord: Tensor, dtype: torch.dtype, *, in_graph: bool = False
) -> Tensor | MixedTables | list[Tensor]:
    """What timm's ``NaFlexVit._generate_rope_naflex`` returns, without a loop over samples.

    Args:
        rope: the module's settings, of :func:`read_rope`.
        patch_coord: (B, N, 2) coordinates (y, x) of the patch tokens, in any number dtype; a sample's grid is its
            largest + 1, and tokens past its h*w are padding.
        dtype: of the result; angles, sines and cosines are computed in float32 at least, under autocast too.
        in_graph: use PyTorch's differentiable, capturable operations alone, and read nothing back to the host.

    Returns:
        (B, 1, N, 2D), D the head's width: sines, then cosines, zeros at padding. For mixed rotary embeddings an
        iterable of (B, heads, N, 2D), one per block.

    Raises:
        ValueError: a negative, non-finite or huge coordinate (not with ``in_graph``; on a GPU only where read back).
    """
    coord = patch_coord.detach().to(torch.int64) if in_graph else whole_numbers(patch_coord)
    batch, length = coord.shape[:2]
    look = not in_graph and coord.device.type == "cpu"  # reading a flag back costs nothing
    by_token = in_graph or batch == 0 or (rope.augment is None and batch == 1)
    # For few tokens fewer operations win; on a GPU sines are free and host reads are not.
    by_token |= not rope.mixed and rope.augment is None and (coord.is_cuda or batch * length <= FEW_TOKENS)
    grids = None
    if not by_token:
        grids = read_grids(coord, one=rope.alike)
        by_token = too_many(grids.cells, batch * length)
    elif look and coord.numel() and int(coord.min()) < 0:
        raise bad_coordinate(int(coord.amin((1, 2)).argmin()))
    if not rope.mixed:
        if grids is None or by_token:
            return closed(rope, coord, dtype, grids, look=look)
        return gathered(rope, grids, dtype)
    if grids is None or by_token:  # one sample has every cell once
        make = mixed_closed(rope, coord, dtype, grids, look=look)
    else:
        make = mixed_gathered(rope, grids, dtype)
    depth = rope.frequencies.shape[1]
    return [make(block) for block in range(depth)] if in_graph else MixedTables(depth, make)
