"""torchtitan: the vision encoders that resample a learned table grid by grid, with their
replacements.

Qwen3.5 (bilinear, aligned corners, in blocks) and Kimi-K2.7 (bicubic), both without antialiasing
and padded to one length. Their loops are functions, which know no model: a choice holds for every
model. The whole batch is resampled at once, in float32 at least, and cast once, as in torchtitan.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..functional import resample_pos_embeds
from ..resampling.matrices import INTERPOLATIONS
from ..tracing import is_dtensor
from .library import AS_INTERPOLATE, Library, Replacement, decide, original

QWEN = "torchtitan.models.qwen3_5.vision_encoder:"
KIMI = "torchtitan.models.kimi_k2_7.vision_encoder:"
_NAME = "_compute_learned_pos_embeds"


def qwen_pos_embeds(
    learned_pos_embed: Tensor,
    grids: list[list[int]],
    max_num_patch: int,
    num_grid_per_side: int,
    spatial_merge_size: int,
    dim: int,
) -> Tensor:
    """Modifications: all images and frames at once, in one step of autograd."""
    side = num_grid_per_side
    args = learned_pos_embed, grids, max_num_patch, side, spatial_merge_size, dim
    return _embeddings(
        QWEN, args, (side, side, dim), mode="bilinear", align_corners=True, merge=spatial_merge_size
    )


def kimi_pos_embeds(
    pos_embed: Tensor, grids: list[list[int]], max_num_patch: int, interpolation_mode: str
) -> Tensor:
    """Modifications: all images and frames at once, in one step of autograd; then the frames'
    times, as before."""
    args = pos_embed, grids, max_num_patch, interpolation_mode
    return _embeddings(KIMI, args, pos_embed.shape, mode=interpolation_mode)


def _embeddings(
    path: str, args: tuple[Any, ...], shape: Sequence[int], *, mode: str, **options: Any
) -> Tensor:
    """The table, which has that ``shape``, resampled; a replicated DTensor of a replicated DTensor,
    as in torchtitan.

    torchtitan's own code also where it checks types, and for sharded tables.
    """
    table, grids, length, *_ = args
    reason = None if mode in INTERPOLATIONS else f"a table resized by {mode}"
    spmd = sys.modules.get("spmd_types")
    if spmd is not None and spmd.is_type_checking():
        reason = "torchtitan's type checks"
    replicated = is_dtensor(table) and all(
        placement.is_replicate() for placement in table.placements
    )
    local = table.to_local() if replicated else table
    strategy: Any = decide(LIBRARY, (path, _NAME), None, local, reason=reason).strategy
    if strategy == "stock":
        return original((path, _NAME))(*args)
    options |= dict(mode=mode, antialias=False, length=length, strategy=strategy)
    cells = resample_pos_embeds(local.reshape(shape), grids, **options)
    if path == KIMI and any(t > 1 for t, _, _ in grids):
        cells = cells + _times(cells, grids)
    if not replicated:
        return cells
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(cells, table.device_mesh)


def _times(cells: Tensor, grids: list[list[int]]) -> Tensor:
    """What torchtitan adds to the frames of a video, (N, P, C) like ``cells``; zeros for images."""
    time_embed = sys.modules[KIMI[:-1]]._get_temporal_pos_embed
    times = torch.zeros_like(cells)
    for image, (t, h, w) in zip(times, grids):
        if t > 1:
            image[: t * h * w].view(t, h * w, -1)[:] = time_embed(
                t, cells.shape[-1], device=cells.device
            )[:, None]
    return times


LIBRARY = Library(
    name="torchtitan",
    oldest=(0, 3, 0),
    newest=(0, 3, 0),
    replacements={
        (QWEN, _NAME): Replacement("pos_embed", qwen_pos_embeds, AS_INTERPOLATE),
        (KIMI, _NAME): Replacement("pos_embed", kimi_pos_embeds, AS_INTERPOLATE),
    },
)
