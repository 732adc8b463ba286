"""Our replacements for timm's methods. Each docstring says only how ours differs from timm's.

Each asks ``decide`` what computes the component, by ``REPLACEMENTS`` at the end of the file, and
hands the work on. In older releases of timm a position table has neither an ``antialias`` nor an
``align_corners`` setting, and an interpolator no ``resampler``.
"""

import threading
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers.patch_embed import PatchEmbedResamplerFixedOrigSize
from timm.models import naflexvit
from torch import Tensor

from ..backends import dispatch
from ..batch.checks import check_tokens
from ..batch.layout import OneGrid
from ..patch_embed.kernels import resample_linear_kernel, resample_patch_kernel
from ..resampling.matrices import INTERPOLATIONS, ResizeSpec
from ..rope.batched import batched_rope
from ..rope.modules import read_rope
from ..strategies import STRATEGIES
from ..tracing import OWN_MEMORY, context_of, why_unsupported
from .library import (
    AS_INTERPOLATE,
    Decision,
    Key,
    Library,
    Replacement,
    call_counts,
    decide,
    original,
    record_fallback,
)

EMBEDS, VIT = "timm.models.naflexvit:NaFlexEmbeds", "timm.models.naflexvit:NaFlexVit"
INTERPOLATOR = "timm.layers.patch_embed:PatchEmbedInterpolator"
RESAMPLER = "timm.layers.patch_embed:PatchEmbedResamplerFixedOrigSize"
FUNCTIONS = "timm.layers.patch_embed:"
# Older releases take the positions of their pos_embed_use_grid_sample from a dense affine grid.
TIMM_REFERENCE = (
    "grid_sample" if hasattr(naflexvit, "_normalize_naflex_grid_sample_coords") else "affine_grid"
)

_calling = threading.local()


def _method(name: str) -> Callable[..., None]:
    """The replacement of timm's method ``name``, for NaFlex batches or for plain images."""

    def add_by_coordinates(self: Any, x: Tensor, patch_coord: Tensor) -> None:
        """Modifications: the chosen strategy; a token gets the cell its own coordinate names."""
        _apply(self, name, x, patch_coord)

    def add_by_grid_size(self: Any, x: Tensor, grid_size: Any) -> None:
        """Modifications: the chosen strategy; in a graph two products. timm's own code under
        "grid_sample"."""
        _apply(self, name, x, grid_size)

    return add_by_coordinates if "_naflex_" in name else add_by_grid_size


def _apply(embeds: Any, name: str, x: Tensor, layout: Any) -> None:
    """Add the tables, resampled by the chosen strategy; or call the method of timm's own that this
    one replaces."""
    learned, interpolation = name.startswith("_apply_learned"), embeds.pos_embed_interp_mode
    reason, known = None, not learned or interpolation in INTERPOLATIONS
    if not known:
        valid = ", ".join(INTERPOLATIONS)
        reason = (
            f"a position table (replaced are {valid}) with interpolation mode {interpolation!r}"
        )
    tensors = (x, layout) if isinstance(layout, Tensor) else (x,)
    tables_at = (embeds, "pos_embed") if learned else (embeds, "pos_embed_y", "pos_embed_x")
    decision = decide(LIBRARY, (EMBEDS, name), embeds, *tensors, tables_at=tables_at, reason=reason)
    if decision.strategy == "stock":
        return _run_timm(embeds, name, x, layout, decision, known)
    strategy = STRATEGIES[decision.strategy]
    # The compiler reads no lru_cache.
    make = ResizeSpec if torch.compiler.is_dynamo_compiling() else _make_spec
    spec = make(
        interpolation if learned else "linear",
        getattr(embeds, "pos_embed_antialias", True),
        learned and getattr(embeds, "pos_embed_align_corners", False),
        embeds.pos_embed_ar_preserving,
        "interpolate" if strategy.reference == "interpolate" else TIMM_REFERENCE,
    )
    where = layout if isinstance(layout, Tensor) else OneGrid(*layout)
    # timm's grid_sample flag samples wherever a coordinate lies.
    on_invalid = partial(
        _run_timm, embeds, name, x, layout, decision, True, "coordinates that name no cell"
    )
    dispatch.add(x, decision.tables, where, spec, strategy, decision.context, on_invalid)


def _run_timm(
    embeds: Any, name: str, x: Tensor, where: Any, decision: Decision, known: bool, reason: str = ""
) -> None:
    """Call timm's own method; for a ``known`` interpolation the one that has the chosen result."""
    if reason:  # a reason that was found after the decision was counted
        call_counts.calls["pos_embed", decision.strategy] -= 1
        record_fallback(LIBRARY, "pos_embed", decision.settings, reason)
    sampled = known and decision.settings.pos_embed not in ("stock", *AS_INTERPOLATE)
    suffix = "_grid_sample" if sampled and name.endswith("_naflex_pos_embed") else ""
    original((EMBEDS, name + suffix), is_called=not suffix)(embeds, x, where)


_make_spec = lru_cache(maxsize=64)(ResizeSpec)


def _generate_rope_naflex(self: Any, x: Tensor, patch_coord: Tensor) -> Any:
    """Modifications: embeddings for the whole batch at once; a token gets the cell its own
    coordinate names."""
    rope = read_rope(self.rope)
    traceable = context_of(x, patch_coord) not in (None, "capture")
    if isinstance(rope, str):
        reason: str | None = rope
    elif rope.augmentation is not None and traceable:
        reason = "random rotary coordinates where operations are traced"
    else:  # a tensor without memory of its own
        reason = None if type(patch_coord) in OWN_MEMORY else why_unsupported(patch_coord)
    decision = decide(LIBRARY, (VIT, "_generate_rope_naflex"), self, reason=reason)
    if isinstance(rope, str) or decision.strategy == "stock":
        return original((VIT, "_generate_rope_naflex"))(self, x, patch_coord)
    check_tokens(x[:, self.num_prefix_tokens :], x.shape[-1], patch_coord)
    coord = patch_coord.to(x.device)
    return batched_rope(rope, coord, x.dtype, traceable=traceable)


def interpolator_forward(
    self: Any,
    patches: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor | None = None,
    patch_size: tuple[int, int] | None = None,
    is_linear: bool = True,
) -> Tensor:
    """Modifications: a separable product; a frozen weight's resampled kernel is reused; an empty
    batch works."""
    size, key = (
        tuple(self.base_patch_size if patch_size is None else patch_size),
        (INTERPOLATOR, "forward"),
    )
    resampler = getattr(
        self, "resampler", self
    )  # which has settings of its own, but in older releases
    fits = is_linear and patches.ndim == 5 and size != tuple(self.base_patch_size)
    fits = fits and type(resampler) in (type(self), PatchEmbedResamplerFixedOrigSize)
    if not (fits and _decide_kernel(self, key, proj_weight, resampler.interpolation)):
        # Older releases call ``resample_patch_embed``, for which this module's settings hold.
        _calling.interpolator = self
        try:
            return original(key)(self, patches, proj_weight, proj_bias, patch_size, is_linear)
        finally:
            _calling.interpolator = None
    channels_last = getattr(self, "channels_last", True)
    options = self.in_chans, channels_last, resampler.interpolation, resampler.antialias
    weight = resample_linear_kernel(proj_weight, tuple(self.base_patch_size), size, *options)
    return F.linear(patches.flatten(2), weight, proj_bias)


def resampler_forward(self: Any, patch_embed: Tensor, new_size: Any) -> Tensor:
    """Modifications: two 1-D pseudo-inverses, kept across models and calls."""
    fits, key = (
        tuple(patch_embed.shape[2:]) == tuple(self.orig_size) and len(new_size) == 2,
        (RESAMPLER, "forward"),
    )
    if not (fits and _decide_kernel(self, key, patch_embed, self.interpolation)):
        return original(key)(self, patch_embed, new_size)
    return resample_patch_kernel(
        patch_embed, tuple(new_size), mode=self.interpolation, antialias=self.antialias
    )


def resample_patch_embed(
    patch_embed: Tensor,
    new_size: Any,
    interpolation: str = "bicubic",
    antialias: bool = True,
    verbose: bool = False,
) -> Tensor:
    """Modifications: as in resampler_forward. The mode for every model holds, or that of the
    caller's module."""
    fits, key = patch_embed.ndim == 4 and len(new_size) == 2, (FUNCTIONS, "resample_patch_embed")
    caller = getattr(_calling, "interpolator", None)
    if not (fits and _decide_kernel(caller, key, patch_embed, interpolation)):
        return original(key)(patch_embed, new_size, interpolation, antialias, verbose)
    return resample_patch_kernel(
        patch_embed, tuple(new_size), mode=interpolation, antialias=antialias
    )


def _decide_kernel(module: Any, key: tuple[str, str], weight: Tensor, interpolation: str) -> bool:
    """Whether ours computes a patch kernel. Counted; an error under ``strict`` where it cannot."""
    known = interpolation in INTERPOLATIONS
    reason = None if known else f"a patch kernel with interpolation mode {interpolation!r}"
    return decide(LIBRARY, key, module, weight, reason=reason).strategy != "stock"


# The strategy by the mode of ``pos_embed``. What is missing stays stock: models made with timm's
# pos_embed_use_grid_sample keep that result, and images without coordinates have no such setting.
AS_CHOSEN = {name: name for name in STRATEGIES}
AS_GRID_SAMPLE = {name: s.for_grid_sample for name, s in STRATEGIES.items() if s.for_grid_sample}

_LEARNED = "pos_embed pos_embed_align_corners pos_embed_ar_preserving pos_embed_interp_mode"
_FACTORIZED = "pos_embed_ar_preserving pos_embed_x pos_embed_y"
_AUGMENTED = "aug_active training shift_coords jitter_coords rescale_coords"
_ANTIALIAS = " pos_embed_antialias"
_LINEAR, _OWN_INVERSE = "resample_linear_weight", "_get_or_create_pinv_matrix"
_INTERPOLATOR = f"base_patch_size resample_conv_weight {_LINEAR}"
_SINCOS = "timm.layers.pos_embed_sincos"
_ROTARY = "get_batch_embeds get_embed _build_embed_cat _build_embed _create_embed _get_pos_embed_from_coords".split()

# What timm's code calls and ours does not. Of functions of a module, those that no other package's
# code calls.
_GRID_SAMPLE = ((naflexvit.__name__ + ":", "_normalize_naflex_grid_sample_coords"),)
_INVERSE = ((FUNCTIONS, "_compute_resize_matrix"), (FUNCTIONS, "_apply_resampling"))
_RESAMPLER = (("", _LINEAR), ("resampler", "forward"), ("resampler", _OWN_INVERSE), *_INVERSE)
_ROPE = tuple(("rope", name) for name in _ROTARY)


def _entry(
    name: str, strategies: Mapping[str, str], attributes: str, skips: tuple[Key, ...] = ()
) -> dict[Key, Any]:
    """The entry of a method that adds position embeddings."""
    return {
        (EMBEDS, name): Replacement("pos_embed", _method(name), strategies, attributes, skips=skips)
    }


_MATMUL = {"matmul": "matmul"}
REPLACEMENTS = {
    **_entry("_apply_learned_naflex_pos_embed", AS_CHOSEN, _LEARNED + _ANTIALIAS),
    **_entry("_apply_learned_naflex_pos_embed_grid_sample", AS_GRID_SAMPLE, _LEARNED, _GRID_SAMPLE),
    **_entry("_apply_learned_pos_embed", AS_INTERPOLATE, _LEARNED + _ANTIALIAS),
    **_entry("_apply_factorized_naflex_pos_embed", AS_CHOSEN, _FACTORIZED),
    **_entry(
        "_apply_factorized_naflex_pos_embed_grid_sample", AS_GRID_SAMPLE, _FACTORIZED, _GRID_SAMPLE
    ),
    **_entry("_apply_factorized_pos_embed", AS_INTERPOLATE, _FACTORIZED),
    (INTERPOLATOR, "forward"): Replacement(
        "patch_embed",
        interpolator_forward,
        _MATMUL,
        _INTERPOLATOR,
        counted_elsewhere=True,
        skips=_RESAMPLER,
    ),
    (RESAMPLER, "forward"): Replacement(
        "patch_embed",
        resampler_forward,
        _MATMUL,
        _OWN_INVERSE + " orig_size",
        skips=(("", _OWN_INVERSE), *_INVERSE),
    ),
    (FUNCTIONS, "resample_patch_embed"): Replacement(
        "patch_embed", resample_patch_embed, _MATMUL, skips=_INVERSE
    ),
}
if hasattr(naflexvit.NaFlexVitCfg, "rope_type"):  # not in timm 1.0.16
    REPLACEMENTS[VIT, "_generate_rope_naflex"] = Replacement(
        "rope",
        _generate_rope_naflex,
        {"batched": "batched"},
        "num_prefix_tokens rope rope_is_mixed",
        skips=_ROPE,
    )

LIBRARY = Library(
    name="timm",
    oldest=(1, 0, 16),
    newest=(1, 0, 31),
    model_classes=("NaFlexEmbeds",),
    example="timm.create_model('naflexvit_base_patch16_gap')",
    replacements=REPLACEMENTS,
    notes={
        (
            1,
            0,
            30,
        ): "this timm resamples SigLIP-2's position table by bicubic; timm >= 1.0.30 by bilinear, as it was "
        "trained: one checkpoint, two results"
    },
    # The layout of a linear weight, and the rotary modules, whose results ``_generate_rope_naflex``
    # hands on.
    copied_methods={
        (INTERPOLATOR, _LINEAR): "base_patch_size channels_last in_chans resampler",
        (
            f"{_SINCOS}:RotaryEmbeddingCat",
            "get_embed",
        ): "_build_embed_cat _use_cached_embed aug_active bands feat_shape pos_embed training",
        (
            f"{_SINCOS}:RotaryEmbeddingCat",
            "get_batch_embeds",
        ): "_build_embed_cat _use_cached_embed aug_active bands "
        "get_embed grid_type ref_feat_shape training",
        (
            f"{_SINCOS}:RotaryEmbeddingDinoV3",
            "_create_embed",
        ): f"{_AUGMENTED} _get_pos_embed_from_coords grid_indexing grid_offset normalize_coords",
        (
            f"{_SINCOS}:RotaryEmbeddingDinoV3",
            "_get_pos_embed_from_coords",
        ): "dim periods rotate_half",
        (f"{_SINCOS}:RotaryEmbeddingDinoV3", "get_batch_embeds"): "get_embed",
        (
            f"{_SINCOS}:RotaryEmbeddingMRope",
            "get_embed",
        ): f"{_AUGMENTED} axis grid_indexing inv_freq",
        (
            f"{_SINCOS}:RotaryEmbeddingMixed",
            "get_embed",
        ): f"{_AUGMENTED} freqs grid_indexing t_x t_y",
        (
            f"{_SINCOS}:RotaryEmbeddingMixed",
            "get_batch_embeds",
        ): "aug_active freqs get_embed grid_indexing training",
    },
)
