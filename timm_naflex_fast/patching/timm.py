"""The methods that stand in for timm's position embeddings. Each says only what differs from timm's of that name.

Each is a dispatcher: it looks up the flags that hold for its module, once, and calls a strategy or timm's original.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..backends import choose as forms
from ..resampling import exact, grid_sample
from ..resampling import interpolate as interpolate_cached
from ..resampling.grids import check_coord, check_tokens, group_grids, whole_batch
from ..resampling.matrices import SEPARABLE_MODES, Resampling
from ..rope import batched_rope, read_rope
from .choice import flags_for

originals: dict[str, Callable[..., Any]] = {}  # timm's methods by name, kept by patch.py
warned: set[str] = set()
EXACT = {"interpolate_cached": interpolate_cached, "matmul": exact}


def _apply_learned_naflex_pos_embed(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: the chosen strategy; a token gets the cell its own coordinate names."""
    strategy = flags_for(self).pos_embed
    if strategy == "stock" or not _separable(self) or _beyond(strategy, x):
        return originals["_apply_learned_naflex_pos_embed"](self, x, patch_coord)
    if strategy == "grid_sample":
        return _sample_learned(self, x, patch_coord)
    check_tokens(x, self.pos_embed.shape[-1])
    add = forms.add_learned if strategy == "matmul" else _add_learned_cached
    add(x, self.pos_embed, patch_coord, _resampling(self))


def _apply_learned_naflex_pos_embed_grid_sample(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: under "grid_sample" ours (the same numbers); otherwise what the model's author chose stays."""
    if flags_for(self).pos_embed != "grid_sample":
        return originals["_apply_learned_naflex_pos_embed_grid_sample"](self, x, patch_coord)
    return _sample_learned(self, x, patch_coord)


def _apply_learned_pos_embed(self: Any, x: Tensor, grid_size: Any) -> None:
    """Modifications: the chosen strategy. While compiling, timm's, which captures; "grid_sample" is NaFlex-only."""
    strategy = flags_for(self).pos_embed
    if strategy in ("stock", "grid_sample") or _capturing() or _beyond(strategy, x) or not _separable(self):
        return originals["_apply_learned_pos_embed"](self, x, grid_size)
    check_tokens(x, self.pos_embed.shape[-1])
    add = EXACT[strategy].add_learned
    return add(x, self.pos_embed, whole_batch(x, grid_size), _resampling(self))


def _apply_factorized_naflex_pos_embed(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: the chosen strategy; a token gets the cell its own coordinate names."""
    strategy = flags_for(self).pos_embed
    if strategy == "stock" or _beyond(strategy, x):
        return originals["_apply_factorized_naflex_pos_embed"](self, x, patch_coord)
    if strategy == "grid_sample":
        return _sample_factorized(self, x, patch_coord)
    check_tokens(x, self.pos_embed_y.shape[-1])
    add = forms.add_factorized if strategy == "matmul" else _add_factorized_cached
    how = self.pos_embed_ar_preserving
    if strategy == "matmul":
        how = Resampling(ar_preserving=how)
    add(x, self.pos_embed_y, self.pos_embed_x, patch_coord, how)


def _apply_factorized_naflex_pos_embed_grid_sample(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: under "grid_sample" ours (the same numbers); otherwise what the model's author chose stays."""
    if flags_for(self).pos_embed != "grid_sample":
        return originals["_apply_factorized_naflex_pos_embed_grid_sample"](self, x, patch_coord)
    return _sample_factorized(self, x, patch_coord)


def _apply_factorized_pos_embed(self: Any, x: Tensor, grid_size: Any) -> None:
    """Modifications: the chosen strategy. While compiling, timm's, which captures; "grid_sample" is NaFlex-only."""
    strategy = flags_for(self).pos_embed
    if strategy in ("stock", "grid_sample") or _capturing() or _beyond(strategy, x):
        return originals["_apply_factorized_pos_embed"](self, x, grid_size)
    check_tokens(x, self.pos_embed_y.shape[-1])
    add = EXACT[strategy].add_factorized
    return add(x, self.pos_embed_y, self.pos_embed_x, whole_batch(x, grid_size), self.pos_embed_ar_preserving)


def _generate_rope_naflex(self: Any, x: Tensor, patch_coord: Tensor) -> Any:
    """Modifications: tables for the whole batch at once; a token gets the cell its own coordinate names."""
    if flags_for(self).rope == "stock":
        return originals["_generate_rope_naflex"](self, x, patch_coord)
    rope = read_rope(self.rope)
    in_graph = _capturing() or _beyond("batched", x) or _beyond("batched", patch_coord)
    if not isinstance(rope, str) and rope.augment is not None and in_graph:
        rope = "random rotary coordinates while capturing a graph"
    if isinstance(rope, str):
        _warn_once(f"{rope} stay with timm's own code")
        return originals["_generate_rope_naflex"](self, x, patch_coord)
    check_coord(patch_coord, x[:, self.num_prefix_tokens :] if self.num_prefix_tokens else x)
    return batched_rope(rope, patch_coord.to(x.device), x.dtype, in_graph=in_graph)


# Finished tables are looked up by the grids, which cannot be captured: under torch.compile these two are a graph
# break, as timm's own loops are.


@torch.compiler.disable
def _add_learned_cached(x: Tensor, table: Tensor, patch_coord: Tensor, how: Resampling) -> None:
    interpolate_cached.add_learned(x, table, group_grids(patch_coord, x), how)


@torch.compiler.disable
def _add_factorized_cached(
    x: Tensor, table_y: Tensor, table_x: Tensor, patch_coord: Tensor, ar_preserving: bool
) -> None:
    interpolate_cached.add_factorized(x, table_y, table_x, group_grids(patch_coord, x), ar_preserving)


def _sample_learned(embeds: Any, x: Tensor, patch_coord: Tensor) -> None:
    check_tokens(x, embeds.pos_embed.shape[-1])
    check_coord(patch_coord, x)
    grid_sample.add_learned(x, embeds.pos_embed, patch_coord, _resampling(embeds), dense_positions=_dense())


def _sample_factorized(embeds: Any, x: Tensor, patch_coord: Tensor) -> None:
    check_tokens(x, embeds.pos_embed_y.shape[-1])
    check_coord(patch_coord, x)
    ar_preserving = embeds.pos_embed_ar_preserving
    grid_sample.add_factorized(x, embeds.pos_embed_y, embeds.pos_embed_x, patch_coord, ar_preserving)


def _resampling(embeds: Any) -> Resampling:
    """The table's resampling; older timm has neither antialias nor align_corners to set and uses these."""
    return Resampling(
        embeds.pos_embed_interp_mode,
        getattr(embeds, "pos_embed_antialias", True),
        getattr(embeds, "pos_embed_align_corners", False),
        embeds.pos_embed_ar_preserving,
    )


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


def _beyond(strategy: str, x: Tensor) -> bool:
    """Whether ``x`` is no ordinary tensor, so that timm's code, made of PyTorch's own operations, must serve.

    So it is for fake and other subclassed tensors, on the meta device, inside ``torch.func`` transforms and in
    forward-mode differentiation. While compiling, the dispatch goes on: what cannot be captured breaks the graph.
    """
    if strategy == "grid_sample" or torch.compiler.is_compiling():
        return False
    return (
        type(x) not in (Tensor, torch.nn.Parameter)
        or x.device.type == "meta"
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def _capturing() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _dense() -> bool:
    """Whether the installed timm takes its grid_sample positions from a dense affine grid, as older releases do."""
    import timm.models.naflexvit as naflexvit

    return not hasattr(naflexvit, "_normalize_naflex_grid_sample_coords")


POS_EMBED = (
    _apply_learned_naflex_pos_embed,
    _apply_learned_naflex_pos_embed_grid_sample,
    _apply_learned_pos_embed,
    _apply_factorized_naflex_pos_embed,
    _apply_factorized_naflex_pos_embed_grid_sample,
    _apply_factorized_pos_embed,
)
ROPE = (_generate_rope_naflex,)
