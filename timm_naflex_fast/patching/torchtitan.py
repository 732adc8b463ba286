"""torchtitan: the vision encoders that resample a learned table grid by grid, with their replacements.

Qwen3.5 (bilinear, aligned corners, in blocks) and Kimi-K2.7 (bicubic), both without antialiasing and padded to one
length. Their loops are functions, which know no model: a choice holds for every model. The whole batch is resampled at
once, in float32 at least, and cast once, as in torchtitan.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..functional import resample_pos_embeds
from ..tracing import is_dtensor
from .library import SAME_RESULT, Library, Replacement, decide, original

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

    def embeddings(table: Tensor, strategy: Any) -> Tensor:
        how: dict[str, Any] = dict(mode="bilinear", antialias=False, align_corners=True, merge=spatial_merge_size)
        table = table.reshape(side, side, dim)
        return resample_pos_embeds(table, grids, length=max_num_patch, strategy=strategy, **how)

    arguments = learned_pos_embed, grids, max_num_patch, side, spatial_merge_size, dim
    return _on_each_rank(QWEN, embeddings, arguments)


def kimi_pos_embeds(pos_embed: Tensor, grids: list[list[int]], max_num_patch: int, interpolation_mode: str) -> Tensor:
    """Modifications: all images and frames at once, in one step of autograd; then the frames' times, as before."""
    known = interpolation_mode in ("bilinear", "bicubic")
    how: dict[str, Any] = dict(mode=interpolation_mode, antialias=False, length=max_num_patch)

    def embeddings(table: Tensor, strategy: Any) -> Tensor:
        cells = resample_pos_embeds(table, grids, strategy=strategy, **how)
        return cells + _times(cells, grids) if any(t > 1 for t, _, _ in grids) else cells

    arguments = pos_embed, grids, max_num_patch, interpolation_mode
    return _on_each_rank(KIMI, embeddings, arguments, None if known else f"a table resized by {interpolation_mode}")


def _times(cells: Tensor, grids: list[list[int]]) -> Tensor:
    """What torchtitan adds to the frames of a video, (N, P, C) like ``cells``; zeros for images."""
    time_embed = sys.modules[KIMI[:-1]]._get_temporal_pos_embed
    times = torch.zeros_like(cells, requires_grad=False)
    for image, (t, h, w) in zip(times, grids):
        if t > 1:
            image[: t * h * w].view(t, h * w, -1)[:] = time_embed(t, cells.shape[-1], device=cells.device)[:, None]
    return times


def _on_each_rank(
    home: str, embeddings: Callable[[Tensor, Any], Tensor], arguments: tuple[Any, ...], reason: str | None = None
) -> Tensor:
    """``embeddings(table, strategy)``, a replicated DTensor for a replicated DTensor, as torchtitan has it.

    torchtitan's own code also where it checks types, and for sharded tables.
    """
    table, spmd = arguments[0], sys.modules.get("spmd_types")
    if spmd is not None and spmd.is_type_checking():
        reason = "torchtitan's type checks"
    replicated = is_dtensor(table) and all(placement.is_replicate() for placement in table.placements)
    local = table.to_local() if replicated else table
    strategy = decide(LIBRARY, (home, _NAME), None, local, reason=reason).strategy
    if strategy == "stock":
        return original((home, _NAME))(*arguments)
    if not replicated:
        return embeddings(table, strategy)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(embeddings(local, strategy), table.device_mesh, table.placements)


LIBRARY = Library(
    name="torchtitan",
    oldest=(0, 3, 0),
    newest=(0, 3, 0),
    model_classes=(),
    example="",
    modes=("stock", *SAME_RESULT),
    replacements={
        (QWEN, _NAME): Replacement("pos_embed", qwen_pos_embeds, SAME_RESULT),
        (KIMI, _NAME): Replacement("pos_embed", kimi_pos_embeds, SAME_RESULT),
    },
)
