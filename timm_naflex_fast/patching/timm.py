"""timm: the methods that take the place of its resampling, each of which says only what differs, and their table.

Each asks ``runs`` who computes the step, by the table at the end of the file, and hands the work on. In older releases
of timm a table has neither an ``antialias`` nor an ``align_corners`` setting, and an interpolator no ``resampler``.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import patch_embed as patch_embed_module
from timm.models import naflexvit
from torch import Tensor

from ..backends import choose
from ..resampling.grids import check_coord
from ..resampling.matrices import SEPARABLE_MODES, Resampling
from ..resampling.patch_kernels import (
    frozen_kernel,
    is_frozen,
    prewarm_factors,
    resample_linear_kernel,
    resample_patch_kernel,
)
from ..rope import batched_rope, read_rope
from .library import Library, Replacement, count, decide, original, runs
from .modes import MODES, chosen

EMBEDS, VIT = "timm.models.naflexvit:NaFlexEmbeds", "timm.models.naflexvit:NaFlexVit"
INTERPOLATOR = "timm.layers.patch_embed:PatchEmbedInterpolator"
RESAMPLER = "timm.layers.patch_embed:PatchEmbedResamplerFixedOrigSize"
FUNCTIONS = "timm.layers.patch_embed:"
# Older releases take the positions of their grid_sample flag from a dense affine grid.
FLAG = "grid_sample" if hasattr(naflexvit, "_normalize_naflex_grid_sample_coords") else "affine_grid"

_within = threading.local()


def _apply_learned_naflex_pos_embed(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: the chosen strategy; a token gets the cell its own coordinate names."""
    who, timms = _who(self, "_apply_learned_naflex_pos_embed", x, patch_coord, self.pos_embed)
    if who == "stock":
        return timms(self, x, patch_coord)
    choose.add(x, (self.pos_embed,), patch_coord, _how(self, who), who)


def _apply_learned_naflex_pos_embed_grid_sample(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: the same positions and result, computed as sums of rows of the table."""
    who, timms = _who(self, "_apply_learned_naflex_pos_embed_grid_sample", x, patch_coord, self.pos_embed)
    if who == "stock":
        return timms(self, x, patch_coord)
    choose.add(x, (self.pos_embed,), patch_coord, _how(self, who), who)


def _apply_learned_pos_embed(self: Any, x: Tensor, grid_size: Any) -> None:
    """Modifications: the chosen strategy. timm's own code while a graph is captured, and under "grid_sample"."""
    who, timms = _who(self, "_apply_learned_pos_embed", x, grid_size, self.pos_embed)
    if who == "stock":
        return timms(self, x, grid_size)
    choose.add(x, (self.pos_embed,), grid_size, _how(self, who), who)


def _apply_factorized_naflex_pos_embed(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: the chosen strategy; a token gets the cell its own coordinate names."""
    who, timms = _who(self, "_apply_factorized_naflex_pos_embed", x, patch_coord, self.pos_embed_y, self.pos_embed_x)
    if who == "stock":
        return timms(self, x, patch_coord)
    choose.add(x, (self.pos_embed_y, self.pos_embed_x), patch_coord, _how(self, who), who)


def _apply_factorized_naflex_pos_embed_grid_sample(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: the same positions and result, computed as sums of rows of the table."""
    who, timms = _who(
        self, "_apply_factorized_naflex_pos_embed_grid_sample", x, patch_coord, self.pos_embed_y, self.pos_embed_x
    )
    if who == "stock":
        return timms(self, x, patch_coord)
    choose.add(x, (self.pos_embed_y, self.pos_embed_x), patch_coord, _how(self, who), who)


def _apply_factorized_pos_embed(self: Any, x: Tensor, grid_size: Any) -> None:
    """Modifications: the chosen strategy. timm's own code while a graph is captured, and under "grid_sample"."""
    who, timms = _who(self, "_apply_factorized_pos_embed", x, grid_size, self.pos_embed_y, self.pos_embed_x)
    if who == "stock":
        return timms(self, x, grid_size)
    choose.add(x, (self.pos_embed_y, self.pos_embed_x), grid_size, _how(self, who), who)


def _who(embeds: Any, name: str, x: Tensor, where: Any, *tables: Tensor) -> tuple[str, Any]:
    """Who adds the position embeddings, and timm's own method with the chosen result."""
    mode = embeds.pos_embed_interp_mode
    unknown = None
    if mode not in SEPARABLE_MODES and len(tables) == 1:
        unknown = f"a position table (replaced are {', '.join(SEPARABLE_MODES)}) with interpolation mode {mode!r}"
    who = runs(LIBRARY, embeds, (EMBEDS, name), x, *tables, unless=unknown or _plain_in_graph(where))
    if who != "stock":
        return who, None
    # If "grid_sample" was chosen and ours cannot run, the method of timm's flag has the chosen result.
    flag = LIBRARY.table[EMBEDS, name].who is NAFLEX and chosen(embeds, "pos_embed", LIBRARY.flags) == "grid_sample"
    return who, original(type(embeds), f"{name}_grid_sample" if flag and unknown is None else name)


def _how(embeds: Any, who: str) -> Resampling:
    return Resampling(
        embeds.pos_embed_interp_mode,
        getattr(embeds, "pos_embed_antialias", True),
        getattr(embeds, "pos_embed_align_corners", False),
        embeds.pos_embed_ar_preserving,
        FLAG if who == "grid_sample" else "interpolate",
    )


def _plain_in_graph(where: Any) -> str | None:
    """Why timm's own code adds to plain images in a graph: it captures as it is, and their grid is one constant."""
    return "a batch of plain images in a captured graph" if not isinstance(where, Tensor) and _capturing() else None


def _capturing() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _generate_rope_naflex(self: Any, x: Tensor, patch_coord: Tensor) -> Any:
    """Modifications: tables for the whole batch at once; a token gets the cell its own coordinate names."""
    in_graph = _capturing() or choose.unusual(x, patch_coord) is not None
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
    who, why = _decide(self, INTERPOLATOR, "resample_linear_weight", weight, self.interpolation)
    if who == "stock":
        return _without_ours(self, "resample_linear_weight", why, weight, target_patch_size)
    count("timm", "patch_embed", who)
    h, w = target_patch_size
    return resample_linear_kernel(
        weight,
        tuple(self.base_patch_size),
        (h, w),
        self.in_chans,
        channels_last=getattr(self, "channels_last", True),
        mode=self.interpolation,
        antialias=self.antialias,
    )


def resample_conv_weight(self: Any, weight: Tensor, target_patch_size: tuple[int, int]) -> Tensor:
    """Modifications: as in resample_linear_weight."""
    fits = weight.ndim == 4 and tuple(weight.shape[2:]) == tuple(self.base_patch_size)
    who, why = _decide(self, INTERPOLATOR, "resample_conv_weight", weight, self.interpolation)
    if who == "stock" or not fits:
        return _without_ours(self, "resample_conv_weight", why, weight, target_patch_size)
    count("timm", "patch_embed", who)
    h, w = target_patch_size
    return resample_patch_kernel(weight, (h, w), mode=self.interpolation, antialias=self.antialias)


def interpolator_forward(
    self: Any,
    patches: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor | None = None,
    patch_size: tuple[int, int] | None = None,
    is_linear: bool = True,
) -> Tensor:
    """Modifications: while the weight is frozen its resampled kernel is reused; an empty batch works."""
    base = tuple(self.base_patch_size)
    h, w = size = base if patch_size is None else tuple(patch_size)
    takes = size != base and (patches.ndim == 5 or not is_linear)
    if not takes or _decide(self, INTERPOLATOR, "forward", proj_weight, self.interpolation)[0] == "stock":
        return original(type(self), "forward")(self, patches, proj_weight, proj_bias, patch_size, is_linear)
    resample = self.resample_linear_weight if is_linear else self.resample_conv_weight
    if is_frozen(proj_weight):
        layout = (self.in_chans, getattr(self, "channels_last", True)) if is_linear else None
        made = choose.calls["patch_embed", "matmul"]
        weight = frozen_kernel(proj_weight, (h, w), (base, self.interpolation, self.antialias, layout), resample)
        if choose.calls["patch_embed", "matmul"] == made:  # ``resample`` did not run: the kernel was kept
            count("timm", "patch_embed", "matmul")
    else:
        weight = resample(proj_weight, size)
    if is_linear:
        return F.linear(patches.flatten(2), weight, proj_bias)
    return F.conv2d(patches, weight, proj_bias, stride=size)


def interpolator_prewarm(self: Any, target_patch_sizes: Any, device: Any = None) -> None:
    """Modifications: computes our factors for the model's layout in place of timm's matrices."""
    sizes = list(target_patch_sizes)
    self.resampler.prewarm(sizes, device=device)
    if self.channels_last:
        _prewarm(self, self.base_patch_size, sizes, self.resampler._cache_device_anchor, device, self.in_chans)


def resampler_forward(self: Any, patch_embed: Tensor, new_size: Any) -> Tensor:
    """Modifications: as in resample_linear_weight."""
    fits = patch_embed.ndim == 4 and len(new_size) == 2 and tuple(patch_embed.shape[2:]) == tuple(self.orig_size)
    who, why = _decide(self, RESAMPLER, "forward", patch_embed, self.interpolation)
    count("timm", "patch_embed", who if fits else "stock", why)
    if who == "stock" or not fits:
        return original(type(self), "forward")(self, patch_embed, new_size)
    return resample_patch_kernel(patch_embed, tuple(new_size), mode=self.interpolation, antialias=self.antialias)


def resampler_prewarm(self: Any, new_sizes: Any, device: Any = None) -> None:
    """Modifications: computes our factors in place of timm's matrices."""
    sizes = list(new_sizes)
    if not _prewarm(self, self.orig_size, sizes, self._cache_device_anchor, device, 1):
        original(type(self), "prewarm")(self, sizes, device)


def resample_patch_embed(
    patch_embed: Tensor, new_size: Any, interpolation: str = "bicubic", antialias: bool = True, verbose: bool = False
) -> Tensor:
    """Modifications: as in resample_linear_weight. A function: the choice for every model holds, no model's own."""
    fits = patch_embed.ndim == 4 and len(new_size) == 2
    who, why = getattr(_within, "decided", None) or _decide(
        None, FUNCTIONS, "resample_patch_embed", patch_embed, interpolation
    )
    count("timm", "patch_embed", who if fits else "stock", why)
    if who == "stock" or not fits:
        timms = original(patch_embed_module, "resample_patch_embed")
        return timms(patch_embed, new_size, interpolation, antialias, verbose)
    return resample_patch_kernel(patch_embed, tuple(new_size), mode=interpolation, antialias=antialias)


def _decide(module: Any, home: str, name: str, weight: Tensor, mode: str) -> tuple[str, str | None]:
    """Who resamples a patch kernel, and why not what was chosen. Only the function that does it counts it."""
    unless = None if mode in SEPARABLE_MODES else f"a patch kernel with interpolation mode {mode!r}"
    return decide(LIBRARY, module, (home, name), weight, unless=unless)


def _without_ours(interpolator: Any, name: str, why: str | None, *arguments: Any) -> Tensor:
    """timm's own method and nothing of ours below it: in older releases it calls ``resample_patch_embed``."""
    method = original(type(interpolator), name)
    if hasattr(interpolator, "resampler"):
        return method(interpolator, *arguments)
    _within.decided = ("stock", why)
    try:
        return method(interpolator, *arguments)
    finally:
        _within.decided = None


def _prewarm(module: Any, old: Any, sizes: list[Any], anchor: Tensor, device: Any, inner: int) -> bool:
    """Compute the factors of each size; False if timm's own code is chosen or has to run."""
    device = anchor.device if device is None else torch.empty(0, device=device).device
    ours = chosen(module, "patch_embed", LIBRARY.flags) != "stock" and module.interpolation in SEPARABLE_MODES
    if not ours or device.type == "meta":
        return False
    for size in sizes:
        h, w = (size, size) if isinstance(size, int) else size
        prewarm_factors(tuple(old), (h, w), module.interpolation, module.antialias, inner, device)
    return True


NAFLEX = {"matmul": "matmul", "interpolate_cached": "interpolate_cached", "grid_sample": "grid_sample"}
FLAGGED = {"matmul": "grid_sample", "grid_sample": "grid_sample"}  # models made with timm's flag keep its result
PLAIN = {"matmul": "matmul", "interpolate_cached": "interpolate_cached"}  # timm's flag is for NaFlex batches alone
PATCH_EMBED, ROPE = {"matmul": "matmul"}, {"batched": "batched"}

_LEARNED = "pos_embed pos_embed_align_corners pos_embed_ar_preserving pos_embed_interp_mode"
_FACTORIZED = "pos_embed_ar_preserving pos_embed_x pos_embed_y"
_AUGMENTED = "aug_active training shift_coords jitter_coords rescale_coords"
_SINCOS = "timm.layers.pos_embed_sincos"
_NO_ROPE = not hasattr(naflexvit.NaFlexVitCfg, "rope_type")  # timm 1.0.16

LIBRARY = Library(
    name="timm",
    oldest=(1, 0, 16),
    newest=(1, 0, 31),
    roots=("NaFlexEmbeds",),
    example="timm.create_model('naflexvit_base_patch16_gap')",
    modes=MODES,
    table={
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
        (VIT, "_generate_rope_naflex"): Replacement(
            "rope", _generate_rope_naflex, ROPE, "num_prefix_tokens rope rope_is_mixed", optional=_NO_ROPE
        ),
        (INTERPOLATOR, "resample_linear_weight"): Replacement(
            "patch_embed", resample_linear_weight, PATCH_EMBED, "base_patch_size channels_last in_chans resampler"
        ),
        (INTERPOLATOR, "resample_conv_weight"): Replacement(
            "patch_embed", resample_conv_weight, PATCH_EMBED, "base_patch_size resampler"
        ),
        (INTERPOLATOR, "forward"): Replacement(
            "patch_embed",
            interpolator_forward,
            PATCH_EMBED,
            "base_patch_size resample_conv_weight resample_linear_weight",
        ),
        (INTERPOLATOR, "prewarm"): Replacement(
            "patch_embed", interpolator_prewarm, PATCH_EMBED, "resampler", optional=True
        ),
        (RESAMPLER, "forward"): Replacement(
            "patch_embed", resampler_forward, PATCH_EMBED, "_get_or_create_pinv_matrix orig_size"
        ),
        (RESAMPLER, "prewarm"): Replacement(
            "patch_embed",
            resampler_prewarm,
            PATCH_EMBED,
            "_cache_device_anchor _get_or_create_pinv_matrix orig_size",
            optional=True,
        ),
        (FUNCTIONS, "resample_patch_embed"): Replacement("patch_embed", resample_patch_embed, PATCH_EMBED),
    },
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
