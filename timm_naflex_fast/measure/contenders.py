"""The contenders that ``drift`` and ``bench`` compare: every code that resamples a position table, each named once.

The names and their words need neither torch nor timm, so a command can define its options from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from ..names import STRATEGY_NAMES

if TYPE_CHECKING:
    from torch import Tensor, nn

LEARNED, SAMPLED = "_apply_learned_naflex_pos_embed", "_apply_learned_naflex_pos_embed_grid_sample"
BASELINE = "stock"
PLAIN_ADD = "plain-add"
"""A contender of ``bench`` alone: it adds ready numbers to the tokens, so it shows what touching the memory costs."""

CONTENDERS = {
    BASELINE: "timm's own loop",
    **dict.fromkeys(STRATEGY_NAMES, "this package"),
    "timm-flag-bilinear": "timm's own grid_sample setting, bilinear",
    "timm-flag-bicubic": "timm's own grid_sample setting, bicubic",
    "issue-2514-zeros": "the proposal in timm issue 2514",
    "hf-siglip2": "the loop in HF transformers' Siglip2",
}
NAMES = tuple(CONTENDERS)


def missing(name: str, embeds: Any) -> str | None:
    """Why a contender cannot run on this NaFlexEmbeds, or would only repeat its own setting; None if it can."""
    if name == BASELINE or name in STRATEGY_NAMES:
        return None
    if embeds.pos_embed_type != "learned":
        return f"it resamples a learned 2-D table; this model's is {embeds.pos_embed_type!r}"
    if embeds.pos_embed_use_grid_sample and name == f"timm-flag-{embeds.pos_embed_interp_mode}":
        return "it is the model's own setting, the same as stock"
    if name == "hf-siglip2":
        try:
            _siglip2_resize()
        except (ImportError, AttributeError) as error:
            return f"transformers does not have it: {error}"
    return None


@contextmanager
def use(name: str, model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` resamples its position table as the contender does; afterwards as before.

    Patch kernels and rotary tables stay timm's own, so that only the position embedding differs. The
    contender is then the NaFlexEmbeds' ``_apply_learned_naflex_pos_embed(x, patch_coord)``, which adds in place.

    Args:
        name: one of ``NAMES`` that is not :func:`missing`.
        model: a NaFlexVit, or a NaFlexEmbeds alone.
    """
    from ..patching.install import enable

    embeds: Any = getattr(model, "embeds", model)
    # Attributes of the one instance hide those of timm's class.
    own = {} if name in STRATEGY_NAMES else _attributes(name, embeds)
    with enable(mode="stock", pos_embed=name if name in STRATEGY_NAMES else "stock", model=model):
        with patch.dict(embeds.__dict__, own):
            yield


def _attributes(name: str, embeds: Any) -> dict[str, Any]:
    """What replaces each of timm's two methods (x, patch_coord), and its setting."""
    from timm.models.naflexvit import NaFlexEmbeds

    from ..patching.install import original

    timms = {method: original(NaFlexEmbeds, method).__get__(embeds) for method in (LEARNED, SAMPLED)}
    if name == BASELINE:
        return timms
    if name.startswith("timm-flag-"):
        return {LEARNED: timms[SAMPLED], SAMPLED: timms[SAMPLED], "pos_embed_interp_mode": name.split("-")[2]}

    def add(x: Tensor, patch_coord: Tensor) -> None:
        table = embeds.pos_embed[0]
        if name == "hf-siglip2":
            added = _siglip2_resize()(table, patch_coord.amax(1) + 1, max_length=patch_coord.shape[1])
        else:
            added = issue_2514(table, patch_coord, embeds.pos_embed_interp_mode)
        x.add_(added.to(x.dtype))

    return dict.fromkeys((LEARNED, SAMPLED), add)


def issue_2514(table: Tensor, patch_coord: Tensor, mode: str) -> Tensor:
    """What timm issue 2514 proposes to add to the tokens.

    Args:
        table: (H0, W0, C), used in float32.
        patch_coord: (B, N, 2) coordinates (y, x).
        mode: "bilinear" or "bicubic".

    Returns:
        (B, N, C) float32.
    """
    import torch
    import torch.nn.functional as F

    sizes = patch_coord.amax(1) + 1
    largest = sizes.amax(0)
    # Each sample's grid is the corner of a dense grid, as large as the largest one in the batch. The affine map
    # spreads the table over that corner: it zooms out about the table's centre, then shifts the centre to the corner's.
    zoom = (largest / sizes).flip(1)  # per sample (x, y)
    theta = torch.cat((torch.diag_embed(zoom), zoom[..., None] - 1), -1)
    positions = F.affine_grid(theta, [len(sizes), 1, *largest.tolist()], align_corners=False)
    # One table per sample, sampled at every cell of the dense grid; then each token takes its own cell.
    tables = table.float().permute(2, 0, 1).expand(len(sizes), -1, -1, -1)
    dense = F.grid_sample(tables, positions, mode=mode, align_corners=False)
    sample = torch.arange(len(sizes), device=table.device)[:, None]
    return dense[sample, :, patch_coord[..., 0], patch_coord[..., 1]]


def _siglip2_resize() -> Callable[..., Tensor]:
    """HF transformers' function: table (H0, W0, C) and sizes (B, 2) to what Siglip2 adds to the tokens, (B, N, C)."""
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    return Siglip2VisionEmbeddings.resize_positional_embeddings
