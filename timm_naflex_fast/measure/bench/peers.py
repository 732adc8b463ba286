"""Other ways to add resampled position embeddings, each as ``add(x) -> tokens``. Not all give timm's result.

| name | what it is | result |
| --- | --- | --- |
| stock | timm's own loop | the reference |
| stock-bilinear, stock-bicubic | timm's own ``pos_embed_use_grid_sample`` path | no antialiasing |
| issue-2514 | timm issue 2514: grid_sample to a dense batch-wide grid, then a gather | no antialiasing, zeros |
| hf-siglip2 | HF transformers' loop over samples | bilinear, antialias, whatever the workload says |
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...patching.install import original
from ...patching.modes import POS_EMBED
from .race import BASELINE, FLOOR

Add = Callable[[Tensor], Tensor]
LEARNED, SAMPLED = "_apply_learned_naflex_pos_embed", "_apply_learned_naflex_pos_embed_grid_sample"
OURS = tuple(name for name in POS_EMBED if name != BASELINE)
NAMES = (BASELINE, "stock-bilinear", "stock-bicubic", "issue-2514", "hf-siglip2", *OURS, FLOOR)


def missing(name: str) -> str | None:
    """Why a contender cannot run here, or None."""
    if name == "hf-siglip2":
        if importlib.util.find_spec("transformers") is None:
            return "transformers is not installed"
        try:
            _hf_resize()
        except (ImportError, AttributeError) as error:
            return f"this transformers does not have it: {error}"
    return None


def adder(name: str, embeds: Any, coord: Tensor) -> Add:
    """The contender ``name`` on the table and options of a NaFlexEmbeds; for ours, that module's own choice is made.

    Args:
        name: one of ``NAMES`` but the floor.
        embeds: its own for each contender; the options may be changed.
        coord: (B, N, 2) coordinates (y, x), row-major.
    """
    if name in OURS:
        return _in_place(getattr(embeds, LEARNED), coord)
    if name == BASELINE:
        return _in_place(_timms_own(LEARNED).__get__(embeds), coord)
    if name in ("stock-bilinear", "stock-bicubic"):
        embeds.pos_embed_interp_mode = name.removeprefix("stock-")
        return _in_place(_timms_own(SAMPLED).__get__(embeds), coord)
    if name == "issue-2514":
        return lambda x: issue_2514(x, embeds.pos_embed[0], coord, embeds.pos_embed_interp_mode)
    if name == "hf-siglip2":
        return _hf_siglip2(embeds.pos_embed, coord)
    raise ValueError(f"{name!r} is not a contender; valid: {', '.join(NAMES)}")


def _in_place(method: Callable[[Tensor, Tensor], None], coord: Tensor) -> Add:
    def add(x: Tensor) -> Tensor:
        method(x, coord)
        return x

    return add


def _timms_own(name: str) -> Callable[..., Any]:
    """timm's method as it came, whether or not it is replaced at present."""
    from timm.models.naflexvit import NaFlexEmbeds

    return original(NaFlexEmbeds, name)


def issue_2514(x: Tensor, table: Tensor, coord: Tensor, mode: str) -> Tensor:
    """``x`` (B, N, C) plus the table (H0, W0, C) sampled as timm issue 2514 proposes.

    Each sample's grid is the corner of a dense grid as large as the batch's largest; ``F.grid_sample`` fills it
    (outside the table with zeros), and every token picks its cell.
    """
    sizes = coord.amax(1) + 1
    largest = sizes.amax(0)
    zoom = (largest / sizes).flip(1)  # per sample (x, y), as affine_grid has them
    theta = torch.cat((torch.diag_embed(zoom), zoom[..., None] - 1), -1)
    grid = F.affine_grid(theta, [len(x), table.shape[-1], *largest.tolist()], align_corners=False)
    tables = table.permute(2, 0, 1).expand(len(x), -1, -1, -1)
    dense = F.grid_sample(tables, grid, mode=mode, padding_mode="zeros", align_corners=False)
    sample = torch.arange(len(x), device=x.device)[:, None]
    return x + dense[sample, :, coord[..., 0], coord[..., 1]].to(x.dtype)


def _hf_siglip2(table: Tensor, coord: Tensor) -> Add:
    resize = _hf_resize()
    shapes = coord.amax(1) + 1  # its processor hands these over ready
    return lambda x: x + resize(table[0], shapes, max_length=coord.shape[1]).to(x.dtype)


def _hf_resize() -> Callable[..., Tensor]:
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    return Siglip2VisionEmbeddings.resize_positional_embeddings
