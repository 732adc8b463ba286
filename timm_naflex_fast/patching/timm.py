"""Our replacements for timm's methods, and their table. Each docstring says only how ours differs from timm's.

Each asks ``runs`` who computes the step, by the table at the end of the file, and hands the work on. In older releases
of timm a table has neither an ``antialias`` nor an ``align_corners`` setting, and an interpolator no ``resampler``.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch.nn.functional as F
from timm.layers import patch_embed as patch_embed_module
from timm.models import naflexvit
from torch import Tensor

from ..backends import dispatch
from ..patch_embed.kernels import frozen_kernel, is_frozen, resample_linear_kernel, resample_patch_kernel
from ..resampling.checks import check_coord
from ..resampling.matrices import INTERPOLATIONS, ResizeSpec
from ..rope.batched import batched_rope
from ..rope.settings import read_rope
from ..tracing import tracer, why_unsupported
from .library import Library, Replacement, original, runs
from .settings import MODES, chosen

EMBEDS, VIT = "timm.models.naflexvit:NaFlexEmbeds", "timm.models.naflexvit:NaFlexVit"
INTERPOLATOR = "timm.layers.patch_embed:PatchEmbedInterpolator"
RESAMPLER = "timm.layers.patch_embed:PatchEmbedResamplerFixedOrigSize"
FUNCTIONS = "timm.layers.patch_embed:"
# Older releases take the positions of their grid_sample flag from a dense affine grid.
FLAG = "grid_sample" if hasattr(naflexvit, "_normalize_naflex_grid_sample_coords") else "affine_grid"

_within = threading.local()


def _apply_learned_naflex_pos_embed(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: the chosen strategy; a token gets the cell its own coordinate names."""
    if how := _ours(self, "_apply_learned_naflex_pos_embed", x, patch_coord):
        dispatch.add(x, (self.pos_embed,), patch_coord, *how)


def _apply_learned_naflex_pos_embed_grid_sample(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: the same positions and result, computed as sums of rows of the table."""
    if how := _ours(self, "_apply_learned_naflex_pos_embed_grid_sample", x, patch_coord):
        dispatch.add(x, (self.pos_embed,), patch_coord, *how)


def _apply_learned_pos_embed(self: Any, x: Tensor, grid_size: Any) -> None:
    """Modifications: the chosen strategy. timm's own code while a graph is captured, and under "grid_sample"."""
    if how := _ours(self, "_apply_learned_pos_embed", x, grid_size):
        dispatch.add(x, (self.pos_embed,), grid_size, *how)


def _apply_factorized_naflex_pos_embed(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: the chosen strategy; a token gets the cell its own coordinate names."""
    if how := _ours(self, "_apply_factorized_naflex_pos_embed", x, patch_coord):
        dispatch.add(x, (self.pos_embed_y, self.pos_embed_x), patch_coord, *how)


def _apply_factorized_naflex_pos_embed_grid_sample(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: the same positions and result, computed as sums of rows of the table."""
    if how := _ours(self, "_apply_factorized_naflex_pos_embed_grid_sample", x, patch_coord):
        dispatch.add(x, (self.pos_embed_y, self.pos_embed_x), patch_coord, *how)


def _apply_factorized_pos_embed(self: Any, x: Tensor, grid_size: Any) -> None:
    """Modifications: the chosen strategy. timm's own code while a graph is captured, and under "grid_sample"."""
    if how := _ours(self, "_apply_factorized_pos_embed", x, grid_size):
        dispatch.add(x, (self.pos_embed_y, self.pos_embed_x), grid_size, *how)


def _ours(embeds: Any, name: str, x: Tensor, where: Any) -> tuple[ResizeSpec, str] | None:
    """How, and by which strategy, ours adds the position embeddings; None if timm's own method had to, and has."""
    learned, mode = name.startswith("_apply_learned"), embeds.pos_embed_interp_mode
    tables = (embeds.pos_embed,) if learned else (embeds.pos_embed_y, embeds.pos_embed_x)
    unknown, unless = learned and mode not in INTERPOLATIONS, None
    if unknown:
        unless = f"a position table (replaced are {', '.join(INTERPOLATIONS)}) with interpolation mode {mode!r}"
    elif not isinstance(where, Tensor) and _capturing():  # timm's own code can be captured: the grid is one constant
        unless = "a batch of plain images in a captured graph"
    who = runs(LIBRARY, embeds, (EMBEDS, name), x, *tables, unless=unless)
    if who == "stock":
        # If "grid_sample" was chosen and ours cannot run, the method of timm's flag has the chosen result.
        flag = LIBRARY.table[EMBEDS, name].who is NAFLEX and chosen(embeds, "pos_embed", LIBRARY.flags) == "grid_sample"
        original(type(embeds), f"{name}_grid_sample" if flag and not unknown else name)(embeds, x, where)
        return None
    how = ResizeSpec(
        mode,
        getattr(embeds, "pos_embed_antialias", True),
        getattr(embeds, "pos_embed_align_corners", False),
        embeds.pos_embed_ar_preserving,
        FLAG if who == "grid_sample" else "interpolate",
    )
    return how, who


def _capturing() -> bool:
    return tracer() is not None


def _generate_rope_naflex(self: Any, x: Tensor, patch_coord: Tensor) -> Any:
    """Modifications: tables for the whole batch at once; a token gets the cell its own coordinate names."""
    in_graph = _capturing() or why_unsupported(x, patch_coord) is not None
    rope = read_rope(self.rope)
    unless = rope if isinstance(rope, str) else None
    if not isinstance(rope, str) and rope.augment is not None and in_graph:
        unless = "random rotary coordinates while a graph is captured"
    who = runs(LIBRARY, self, (VIT, "_generate_rope_naflex"), unless=unless)
    if who == "stock" or isinstance(rope, str):
        return original(type(self), "_generate_rope_naflex")(self, x, patch_coord)
    check_coord(patch_coord, x[:, self.num_prefix_tokens :] if self.num_prefix_tokens else x)
    return batched_rope(rope, patch_coord.to(x.device), x.dtype, in_graph=in_graph)


def resample_linear_weight(self: Any, weight: Tensor, target_patch_size: tuple[int, int]) -> Tensor:
    """Modifications: two 1-D pseudo-inverses, kept across models and calls, and a separable product."""
    if _who(self, (INTERPOLATOR, _LINEAR), weight, self.interpolation) == "stock":
        return _timms_linear(self, weight, target_patch_size)
    return _linear_kernel(self, weight, target_patch_size)


def interpolator_forward(
    self: Any,
    patches: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor | None = None,
    patch_size: tuple[int, int] | None = None,
    is_linear: bool = True,
) -> Tensor:
    """Modifications: while the weight is frozen its resampled kernel is reused; an empty batch works."""
    size = tuple(self.base_patch_size if patch_size is None else patch_size)
    takes = is_linear and patches.ndim == 5 and size != tuple(self.base_patch_size)
    if not takes or _who(self, (INTERPOLATOR, "forward"), proj_weight, self.interpolation) == "stock":
        return original(type(self), "forward")(self, patches, proj_weight, proj_bias, patch_size, is_linear)
    if is_frozen(proj_weight):
        layout = self.in_chans, getattr(self, "channels_last", True)
        how = (tuple(self.base_patch_size), self.interpolation, self.antialias, layout)
        weight = frozen_kernel(proj_weight, size, how, partial(_linear_kernel, self))
    else:
        weight = _linear_kernel(self, proj_weight, size)
    return F.linear(patches.flatten(2), weight, proj_bias)


def resampler_forward(self: Any, patch_embed: Tensor, new_size: Any) -> Tensor:
    """Modifications: as in resample_linear_weight."""
    fits = patch_embed.ndim == 4 and len(new_size) == 2 and tuple(patch_embed.shape[2:]) == tuple(self.orig_size)
    if not fits or _who(self, (RESAMPLER, "forward"), patch_embed, self.interpolation) == "stock":
        return original(type(self), "forward")(self, patch_embed, new_size)
    return resample_patch_kernel(patch_embed, tuple(new_size), mode=self.interpolation, antialias=self.antialias)


def resample_patch_embed(
    patch_embed: Tensor, new_size: Any, interpolation: str = "bicubic", antialias: bool = True, verbose: bool = False
) -> Tensor:
    """Modifications: as in resample_linear_weight. The choice for every model holds, or that of the caller's module."""
    fits = patch_embed.ndim == 4 and len(new_size) == 2
    caller = getattr(_within, "interpolator", None)
    if not fits or _who(caller, (FUNCTIONS, "resample_patch_embed"), patch_embed, interpolation) == "stock":
        timms = original(patch_embed_module, "resample_patch_embed")
        return timms(patch_embed, new_size, interpolation, antialias, verbose)
    return resample_patch_kernel(patch_embed, tuple(new_size), mode=interpolation, antialias=antialias)


def _who(module: Any, key: tuple[str, str], weight: Tensor, mode: str) -> str:
    unless = None if mode in INTERPOLATIONS else f"a patch kernel with interpolation mode {mode!r}"
    return runs(LIBRARY, module, key, weight, unless=unless)


def _linear_kernel(interpolator: Any, weight: Tensor, size: tuple[int, int]) -> Tensor:
    return resample_linear_kernel(
        weight,
        tuple(interpolator.base_patch_size),
        size,
        interpolator.in_chans,
        channels_last=getattr(interpolator, "channels_last", True),
        mode=interpolator.interpolation,
        antialias=interpolator.antialias,
    )


def _timms_linear(interpolator: Any, weight: Tensor, size: tuple[int, int]) -> Tensor:
    """timm's own method. In older releases it calls ``resample_patch_embed``, for which this module's choice holds."""
    _within.interpolator = interpolator
    try:
        return original(type(interpolator), _LINEAR)(interpolator, weight, size)
    finally:
        _within.interpolator = None


NAFLEX = {"matmul": "matmul", "interpolate_cached": "interpolate_cached", "grid_sample": "grid_sample"}
FLAGGED = {"matmul": "grid_sample", "grid_sample": "grid_sample"}  # models made with timm's flag keep its result
PLAIN = {"matmul": "matmul", "interpolate_cached": "interpolate_cached"}  # timm's flag is for NaFlex batches alone

_LEARNED = "pos_embed pos_embed_align_corners pos_embed_ar_preserving pos_embed_interp_mode"
_FACTORIZED = "pos_embed_ar_preserving pos_embed_x pos_embed_y"
_AUGMENTED = "aug_active training shift_coords jitter_coords rescale_coords"
_LINEAR = "resample_linear_weight"
_SINCOS = "timm.layers.pos_embed_sincos"

TABLE = {
    **{
        (EMBEDS, ours.__name__): Replacement("pos_embed", ours, who, reads)
        for ours, who, reads in (
            (_apply_learned_naflex_pos_embed, NAFLEX, f"{_LEARNED} pos_embed_antialias"),
            (_apply_learned_naflex_pos_embed_grid_sample, FLAGGED, _LEARNED),
            (_apply_learned_pos_embed, PLAIN, f"{_LEARNED} pos_embed_antialias"),
            (_apply_factorized_naflex_pos_embed, NAFLEX, _FACTORIZED),
            (_apply_factorized_naflex_pos_embed_grid_sample, FLAGGED, _FACTORIZED),
            (_apply_factorized_pos_embed, PLAIN, _FACTORIZED),
        )
    },
    **{
        (home, name): Replacement("patch_embed", ours, {"matmul": "matmul"}, reads, hands_on=home is INTERPOLATOR)
        for home, name, ours, reads in (
            (INTERPOLATOR, "forward", interpolator_forward, "base_patch_size resample_conv_weight " + _LINEAR),
            (INTERPOLATOR, _LINEAR, resample_linear_weight, "base_patch_size channels_last in_chans resampler"),
            (RESAMPLER, "forward", resampler_forward, "_get_or_create_pinv_matrix orig_size"),
            (FUNCTIONS, "resample_patch_embed", resample_patch_embed, None),
        )
    },
}
if hasattr(naflexvit.NaFlexVitCfg, "rope_type"):  # not in timm 1.0.16
    TABLE[VIT, "_generate_rope_naflex"] = Replacement(
        "rope", _generate_rope_naflex, {"batched": "batched"}, "num_prefix_tokens rope rope_is_mixed"
    )

LIBRARY = Library(
    name="timm",
    oldest=(1, 0, 16),
    newest=(1, 0, 31),
    roots=("NaFlexEmbeds",),
    example="timm.create_model('naflexvit_base_patch16_gap')",
    modes=MODES,
    table=TABLE,
    # The rotary modules, whose results ``_generate_rope_naflex`` hands on.
    reads={
        (f"{_SINCOS}:RotaryEmbeddingCat", "get_embed"): "_build_embed_cat _use_cached_embed aug_active bands "
        "feat_shape pos_embed training",
        (f"{_SINCOS}:RotaryEmbeddingCat", "get_batch_embeds"): "_build_embed_cat _use_cached_embed aug_active bands "
        "get_embed grid_type ref_feat_shape training",
        (f"{_SINCOS}:RotaryEmbeddingDinoV3", "_create_embed"): f"{_AUGMENTED} _get_pos_embed_from_coords "
        "grid_indexing grid_offset normalize_coords",
        (f"{_SINCOS}:RotaryEmbeddingDinoV3", "_get_pos_embed_from_coords"): "dim periods rotate_half",
        (f"{_SINCOS}:RotaryEmbeddingDinoV3", "get_batch_embeds"): "get_embed",
        (f"{_SINCOS}:RotaryEmbeddingMRope", "get_embed"): f"{_AUGMENTED} axis grid_indexing inv_freq",
        (f"{_SINCOS}:RotaryEmbeddingMixed", "get_embed"): f"{_AUGMENTED} freqs grid_indexing t_x t_y",
        (f"{_SINCOS}:RotaryEmbeddingMixed", "get_batch_embeds"): "aug_active freqs get_embed grid_indexing training",
    },
)
