"""The methods that stand in for timm's position embeddings. Each says only what differs from timm's of that name.

Each is a dispatcher: it looks up the flags that hold for its module, once, and calls a strategy or timm's original.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..backends.choose import add_factorized, add_learned, unusual
from ..resampling.grids import check_coord
from ..resampling.matrices import SEPARABLE_MODES, Resampling
from ..rope import batched_rope, read_rope
from .choice import flags_for

originals: dict[str, Callable[..., Any]] = {}  # timm's methods by name, kept by patch.py
warned: set[str] = set()


def _apply_learned_naflex_pos_embed(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: the chosen strategy; a token gets the cell its own coordinate names."""
    strategy = flags_for(self).pos_embed
    if strategy == "stock" or not _separable(self) or unusual(x, self.pos_embed):
        return originals["_apply_learned_naflex_pos_embed"](self, x, patch_coord)
    add_learned(x, self.pos_embed, patch_coord, _resampling(self, strategy), _exact(strategy))


def _apply_learned_naflex_pos_embed_grid_sample(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: fast sums, but for "interpolate_cached", which calls ``F.grid_sample`` as timm does."""
    if flags_for(self).pos_embed in ("stock", "interpolate_cached") or unusual(x, self.pos_embed):
        return originals["_apply_learned_naflex_pos_embed_grid_sample"](self, x, patch_coord)
    add_learned(x, self.pos_embed, patch_coord, _resampling(self, "grid_sample"))


def _apply_learned_pos_embed(self: Any, x: Tensor, grid_size: Any) -> None:
    """Modifications: the chosen strategy. While compiling, timm's, which captures; "grid_sample" is NaFlex-only."""
    strategy = flags_for(self).pos_embed
    mine = strategy not in ("stock", "grid_sample") and not _capturing() and _separable(self)
    if not mine or unusual(x, self.pos_embed):
        return originals["_apply_learned_pos_embed"](self, x, grid_size)
    return add_learned(x, self.pos_embed, tuple(grid_size), _resampling(self, strategy), strategy)


def _apply_factorized_naflex_pos_embed(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: the chosen strategy; a token gets the cell its own coordinate names."""
    strategy = flags_for(self).pos_embed
    if strategy == "stock" or unusual(x, self.pos_embed_y):
        return originals["_apply_factorized_naflex_pos_embed"](self, x, patch_coord)
    how = _factorized(self, strategy)
    add_factorized(x, self.pos_embed_y, self.pos_embed_x, patch_coord, how, _exact(strategy))


def _apply_factorized_naflex_pos_embed_grid_sample(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: fast sums, but for "interpolate_cached", which calls ``F.grid_sample`` as timm does."""
    if flags_for(self).pos_embed in ("stock", "interpolate_cached") or unusual(x, self.pos_embed_y):
        return originals["_apply_factorized_naflex_pos_embed_grid_sample"](self, x, patch_coord)
    add_factorized(x, self.pos_embed_y, self.pos_embed_x, patch_coord, _factorized(self, "grid_sample"))


def _apply_factorized_pos_embed(self: Any, x: Tensor, grid_size: Any) -> None:
    """Modifications: the chosen strategy. While compiling, timm's, which captures; "grid_sample" is NaFlex-only."""
    strategy = flags_for(self).pos_embed
    mine = strategy not in ("stock", "grid_sample") and not _capturing()
    if not mine or unusual(x, self.pos_embed_y):
        return originals["_apply_factorized_pos_embed"](self, x, grid_size)
    how = _factorized(self, strategy)
    return add_factorized(x, self.pos_embed_y, self.pos_embed_x, tuple(grid_size), how, strategy)


def _generate_rope_naflex(self: Any, x: Tensor, patch_coord: Tensor) -> Any:
    """Modifications: tables for the whole batch at once; a token gets the cell its own coordinate names."""
    if flags_for(self).rope == "stock":
        return originals["_generate_rope_naflex"](self, x, patch_coord)
    rope = read_rope(self.rope)
    in_graph = _capturing() or unusual(x, patch_coord) is not None
    if not isinstance(rope, str) and rope.augment is not None and in_graph:
        rope = "random rotary coordinates while capturing a graph"
    if isinstance(rope, str):
        _warn_once(f"{rope} stay with timm's own code")
        return originals["_generate_rope_naflex"](self, x, patch_coord)
    check_coord(patch_coord, x[:, self.num_prefix_tokens :] if self.num_prefix_tokens else x)
    return batched_rope(rope, patch_coord.to(x.device), x.dtype, in_graph=in_graph)


def _resampling(embeds: Any, strategy: str) -> Resampling:
    """The table's resampling; older timm has neither antialias nor align_corners to set and uses these."""
    return Resampling(
        embeds.pos_embed_interp_mode,
        getattr(embeds, "pos_embed_antialias", True),
        getattr(embeds, "pos_embed_align_corners", False),
        embeds.pos_embed_ar_preserving,
        _sampler() if strategy == "grid_sample" else "interpolate",
    )


def _factorized(embeds: Any, strategy: str) -> Resampling:
    sampler = "affine_grid" if strategy == "grid_sample" else "interpolate"
    return Resampling(ar_preserving=embeds.pos_embed_ar_preserving, sampler=sampler)


def _exact(strategy: str) -> str:
    """The strategy of the sums: "grid_sample" is the matmul strategy with other matrices."""
    return "matmul" if strategy == "grid_sample" else strategy


def _separable(embeds: Any) -> bool:
    mode = embeds.pos_embed_interp_mode
    if mode in SEPARABLE_MODES:
        return True
    _warn_once(
        f"a position table with interpolation mode {mode!r} stays with timm's own code; "
        f"replaced are {', '.join(map(repr, SEPARABLE_MODES))}"
    )
    return False


def _warn_once(message: str) -> None:
    if message not in warned:
        warned.add(message)
        warnings.warn(f"timm_naflex_fast: {message}", stacklevel=5)


def _capturing() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _sampler() -> str:
    """Where the installed timm's flag takes its positions from: older releases take them from a dense affine grid."""
    import timm.models.naflexvit as naflexvit

    return "grid_sample" if hasattr(naflexvit, "_normalize_naflex_grid_sample_coords") else "affine_grid"


POS_EMBED = (
    _apply_learned_naflex_pos_embed,
    _apply_learned_naflex_pos_embed_grid_sample,
    _apply_learned_pos_embed,
    _apply_factorized_naflex_pos_embed,
    _apply_factorized_naflex_pos_embed_grid_sample,
    _apply_factorized_pos_embed,
)
ROPE = (_generate_rope_naflex,)
