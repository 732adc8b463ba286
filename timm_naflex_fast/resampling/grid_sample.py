"""timm's own form of its ``pos_embed_use_grid_sample`` flag: one ``F.grid_sample`` for all tokens of a batch.

It has no antialiasing, so wherever a grid is smaller than the table the result drifts from ``F.interpolate``. Eager
code and compiled graphs run the same sums as the matmul strategy instead, with matrices read off ``F.grid_sample``
(``sample_matrix`` in matrices.py), which are many times faster. This form is for exported graphs, which cannot look
into the coordinates.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .matrices import Resampling


def sample(table: Tensor, patch_coord: Tensor, how: Resampling) -> Tensor:
    """The table (H0, W0, C) sampled at the position of each token (B, N, 2): (B, N, C) float32.

    Source: ``timm.models.naflexvit.NaFlexEmbeds._apply_learned_naflex_pos_embed_grid_sample``, in the same order of
    float32 operations.
    """
    shapes = patch_coord.amax(1, keepdim=True) + 1
    if how.ar_preserving:
        shapes = shapes.amax(2, keepdim=True)
    coord = patch_coord.float()
    if how.align_corners:
        positions = 2.0 * coord / (shapes - 1).clamp(min=1) - 1.0
    else:
        positions = (2.0 * coord + 1.0) / shapes - 1.0
    sampled = F.grid_sample(
        table[None].permute(0, 3, 1, 2).expand(len(patch_coord), -1, -1, -1).float(),
        positions.flip(-1)[:, :, None],  # F.grid_sample wants (x, y)
        mode=how.mode,
        padding_mode="border",
        align_corners=how.align_corners,
    )
    return sampled[..., 0].transpose(1, 2)
