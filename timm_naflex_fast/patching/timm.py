"""Our replacements for timm's methods. Each docstring says only how ours differs from timm's.

Each asks what computes the component, by ``REPLACEMENTS`` at the end of the file, and hands the
work on. In older releases of timm a position table has neither an ``antialias`` nor an
``align_corners`` setting, and an interpolator no ``resampler``.
"""

import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers.patch_embed import PatchEmbedResamplerFixedOrigSize
from timm.models import naflexvit
from torch import Tensor

from ..backends import dispatch
from ..batch.checks import InvalidCoordinateError, check_tokens
from ..batch.layout import Coordinates, OneGrid
from ..patch_embed.kernels import resample_linear_kernel, resample_patch_kernel
from ..resampling.spec import INTERPOLATIONS, ResizeSpec
from ..rope.batched import batched_rope
from ..rope.modules import read_rope
from ..strategies import STRATEGIES
from ..tracing import OWN_MEMORY, context_of, why_unsupported
from .decide import Decision, choose, count, decide, lacks_operator
from .library import (
    AS_INTERPOLATE,
    Calls,
    Key,
    Library,
    Replacement,
    original,
    without_ours,
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


class Method(NamedTuple):
    """A method of timm's that adds position embeddings."""

    name: str
    tables: tuple[str, ...]  # one learned table, or the two of a factorized embedding
    sampled: str = ""  # timm's own method that has the result of "grid_sample", if there is one


def _by_coordinates(method: Method) -> Callable[..., None]:
    """The replacement of a method for NaFlex batches."""

    def add_by_coordinates(self: Any, x: Tensor, patch_coord: Tensor) -> None:
        """Modifications: the chosen strategy; a token gets the cell its own coordinate names."""
        _apply(self, method, x, patch_coord)

    return add_by_coordinates


def _by_grid_size(method: Method) -> Callable[..., None]:
    """The replacement of a method for plain images."""

    def add_by_grid_size(self: Any, x: Tensor, grid_size: Any) -> None:
        """Modifications: the chosen strategy; two products in a graph; never "grid_sample"."""
        _apply(self, method, x, grid_size)

    return add_by_grid_size


def _apply(embeds: Any, method: Method, x: Tensor, layout: Any) -> None:
    """Add the tables, resampled as chosen; or call the method of timm's that this one replaces."""
    tensors = (x, layout) if isinstance(layout, Tensor) else (x,)
    key = EMBEDS, method.name
    reason = _why_unknown(embeds, method)
    tables_at = (embeds, *method.tables)
    decision = choose(LIBRARY, key, embeds, *tensors, tables_at=tables_at, reason=reason)
    if decision.strategy != "stock":
        reason = _add(embeds, method, x, layout, decision)
        if reason is not None:
            decision = Decision("stock", decision.settings, reason=reason)
    count(LIBRARY, key, decision)
    if decision.strategy == "stock":
        sampled = decision.settings.pos_embed not in ("stock", *AS_INTERPOLATE)
        if sampled and method.sampled and _why_unknown(embeds, method) is None:
            without_ours((EMBEDS, method.sampled))(embeds, x, layout)
        else:
            original(key)(embeds, x, layout)


def _why_unknown(embeds: Any, method: Method) -> str | None:
    """Why ours cannot resize such a table, in words; None: it can."""
    interpolation = embeds.pos_embed_interp_mode
    if len(method.tables) == 2 or interpolation in INTERPOLATIONS:
        return None
    valid = ", ".join(INTERPOLATIONS)
    return f"a position table (replaced are {valid}) with interpolation mode {interpolation!r}"


def _add(embeds: Any, method: Method, x: Tensor, layout: Any, decision: Decision) -> str | None:
    """Add the tables, resampled by the strategy; or say why timm's own code has to do it."""
    strategy = STRATEGIES[decision.strategy]
    learned = len(method.tables) == 1
    # The compiler reads no lru_cache.
    make = ResizeSpec if torch.compiler.is_dynamo_compiling() else _make_spec
    spec = make(
        embeds.pos_embed_interp_mode if learned else "linear",
        getattr(embeds, "pos_embed_antialias", True),
        learned and getattr(embeds, "pos_embed_align_corners", False),
        embeds.pos_embed_ar_preserving,
        "interpolate" if strategy.reference == "interpolate" else TIMM_REFERENCE,
    )
    where = Coordinates(layout) if isinstance(layout, Tensor) else OneGrid(*layout)
    if decision.context not in (None, "device"):
        dispatch.add(x, decision.tables, where, spec, strategy, decision.context)
        return None
    try:
        dispatch.add(x, decision.tables, where, spec, strategy, decision.context)
    except InvalidCoordinateError:
        # timm's grid_sample flag samples wherever a coordinate lies.
        return "coordinates that name no cell"
    except NotImplementedError as error:
        return lacks_operator(x.device, error)
    return None


_make_spec = lru_cache(maxsize=64)(ResizeSpec)


def _generate_rope_naflex(self: Any, x: Tensor, patch_coord: Tensor) -> Any:
    """Modifications: the whole batch at once; a token gets the cell its own coordinate names."""
    key = VIT, "_generate_rope_naflex"
    rope = read_rope(self.rope)
    traceable = context_of(x, patch_coord) not in (None, "capture", "device")
    reason: str | None = None
    if isinstance(rope, str):
        reason = rope
    elif type(patch_coord) not in OWN_MEMORY:
        reason = why_unsupported(patch_coord)
    decision = decide(LIBRARY, key, self, reason=reason)
    if isinstance(rope, str) or decision.strategy == "stock":
        return original(key)(self, x, patch_coord)
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
    """Modifications: separable; a frozen weight's kernel is kept; an empty batch works."""
    key = INTERPOLATOR, "forward"
    base_size: Any = tuple(self.base_patch_size)
    size: Any = base_size if patch_size is None else tuple(patch_size)
    # Which has settings of its own, but in older releases.
    resampler = getattr(self, "resampler", self)
    is_known = type(resampler) in (type(self), PatchEmbedResamplerFixedOrigSize)
    fits = is_linear and patches.ndim == 5 and size != base_size
    if not (fits and is_known and _ours_resamples(self, key, proj_weight, resampler.interpolation)):
        # Older releases call ``resample_patch_embed``, for which this module's settings hold.
        _calling.interpolator = self
        try:
            return original(key)(self, patches, proj_weight, proj_bias, patch_size, is_linear)
        finally:
            _calling.interpolator = None
    channels_last = getattr(self, "channels_last", True)
    options = self.in_chans, channels_last, resampler.interpolation, resampler.antialias
    weight = resample_linear_kernel(proj_weight, base_size, size, *options)
    return F.linear(patches.flatten(2), weight, proj_bias)


def resampler_forward(self: Any, patch_embed: Tensor, new_size: Any) -> Tensor:
    """Modifications: two 1-D pseudo-inverses, kept across models and calls."""
    key = RESAMPLER, "forward"
    fits = tuple(patch_embed.shape[2:]) == tuple(self.orig_size) and len(new_size) == 2
    if not (fits and _ours_resamples(self, key, patch_embed, self.interpolation)):
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
    """Modifications: as in resampler_forward, by the settings of the module that calls, if any."""
    key = FUNCTIONS, "resample_patch_embed"
    fits = patch_embed.ndim == 4 and len(new_size) == 2
    caller = getattr(_calling, "interpolator", None)
    if not (fits and _ours_resamples(caller, key, patch_embed, interpolation)):
        return original(key)(patch_embed, new_size, interpolation, antialias, verbose)
    return resample_patch_kernel(
        patch_embed, tuple(new_size), mode=interpolation, antialias=antialias
    )


def _ours_resamples(module: Any, key: Key, weight: Tensor, interpolation: str) -> bool:
    """Whether ours computes a patch kernel. Counted; an error under ``strict`` where it cannot."""
    reason = None
    if interpolation not in INTERPOLATIONS:
        reason = f"a patch kernel with interpolation mode {interpolation!r}"
    return decide(LIBRARY, key, module, weight, reason=reason).strategy != "stock"


# The strategy by the mode of ``pos_embed``. What is missing stays stock: models made with timm's
# pos_embed_use_grid_sample keep that result, and images without coordinates have no such setting.
AS_CHOSEN = {name: name for name in STRATEGIES}
AS_GRID_SAMPLE: dict[str, str] = {}
for _name, _strategy in STRATEGIES.items():
    if _strategy.for_grid_sample:
        AS_GRID_SAMPLE[_name] = _strategy.for_grid_sample

# What timm's code calls and ours does not. Of functions of a module, those that no other package's
# code calls.
_POSITIONS = (Calls.function(naflexvit.__name__, "_normalize_naflex_grid_sample_coords"),)
_OWN_INVERSE = "_get_or_create_pinv_matrix"
_INVERSE = (
    Calls.function("timm.layers.patch_embed", "_compute_resize_matrix"),
    Calls.function("timm.layers.patch_embed", "_apply_resampling"),
)
_ROTARY = (
    Calls.of("rope", "get_batch_embeds"),
    Calls.of("rope", "get_embed"),
    Calls.of("rope", "_build_embed_cat"),
    Calls.of("rope", "_build_embed"),
    Calls.of("rope", "_create_embed"),
    Calls.of("rope", "_get_pos_embed_from_coords"),
)


def _position_methods(
    kind: str, tables: tuple[str, ...], reads: str, reads_unsampled: str = ""
) -> dict[Key, Replacement]:
    """The entries of the three methods that add one kind of tables.

    The method that samples does not read ``reads_unsampled``.
    """
    by_coordinates = f"_apply_{kind}_naflex_pos_embed"
    sampled = f"{by_coordinates}_grid_sample"
    by_grid_size = f"_apply_{kind}_pos_embed"
    return {
        (EMBEDS, by_coordinates): Replacement(
            component="pos_embed",
            function=_by_coordinates(Method(by_coordinates, tables, sampled)),
            strategies=AS_CHOSEN,
            attributes=f"{reads} {reads_unsampled}",
        ),
        (EMBEDS, sampled): Replacement(
            component="pos_embed",
            function=_by_coordinates(Method(sampled, tables)),
            strategies=AS_GRID_SAMPLE,
            attributes=reads,
            skips=_POSITIONS,
        ),
        (EMBEDS, by_grid_size): Replacement(
            component="pos_embed",
            function=_by_grid_size(Method(by_grid_size, tables)),
            strategies=AS_INTERPOLATE,
            attributes=f"{reads} {reads_unsampled}",
        ),
    }


REPLACEMENTS = {
    **_position_methods(
        "learned",
        tables=("pos_embed",),
        reads="pos_embed pos_embed_align_corners pos_embed_ar_preserving pos_embed_interp_mode",
        reads_unsampled="pos_embed_antialias",
    ),
    **_position_methods(
        "factorized",
        tables=("pos_embed_y", "pos_embed_x"),
        reads="pos_embed_ar_preserving pos_embed_x pos_embed_y",
    ),
    (INTERPOLATOR, "forward"): Replacement(
        component="patch_embed",
        function=interpolator_forward,
        strategies={"matmul": "matmul"},
        attributes="base_patch_size resample_conv_weight resample_linear_weight",
        counted_elsewhere=True,
        skips=(
            Calls.own("resample_linear_weight"),
            Calls.of("resampler", "forward"),
            Calls.of("resampler", _OWN_INVERSE),
            *_INVERSE,
        ),
    ),
    (RESAMPLER, "forward"): Replacement(
        component="patch_embed",
        function=resampler_forward,
        strategies={"matmul": "matmul"},
        attributes="_get_or_create_pinv_matrix orig_size",
        skips=(Calls.own(_OWN_INVERSE), *_INVERSE),
    ),
    (FUNCTIONS, "resample_patch_embed"): Replacement(
        component="patch_embed",
        function=resample_patch_embed,
        strategies={"matmul": "matmul"},
        skips=_INVERSE,
    ),
}
if hasattr(naflexvit.NaFlexVitCfg, "rope_type"):  # not in timm 1.0.16
    REPLACEMENTS[VIT, "_generate_rope_naflex"] = Replacement(
        component="rope",
        function=_generate_rope_naflex,
        strategies={"batched": "batched"},
        attributes="num_prefix_tokens rope rope_is_mixed",
        skips=_ROTARY,
    )

# The layout of a linear weight, and the rotary modules, whose results ``_generate_rope_naflex``
# hands on.
_CAT = "timm.layers.pos_embed_sincos:RotaryEmbeddingCat"
_DINO_V3 = "timm.layers.pos_embed_sincos:RotaryEmbeddingDinoV3"
_MROPE = "timm.layers.pos_embed_sincos:RotaryEmbeddingMRope"
_MIXED = "timm.layers.pos_embed_sincos:RotaryEmbeddingMixed"
COPIED_METHODS = {
    (INTERPOLATOR, "resample_linear_weight"): "base_patch_size channels_last in_chans resampler",
    (_CAT, "get_embed"): "_build_embed_cat _use_cached_embed aug_active bands feat_shape pos_embed "
    "training",
    (_CAT, "get_batch_embeds"): "_build_embed_cat _use_cached_embed aug_active bands get_embed "
    "grid_type ref_feat_shape training",
    (_DINO_V3, "_create_embed"): "_get_pos_embed_from_coords aug_active grid_indexing grid_offset "
    "jitter_coords normalize_coords rescale_coords shift_coords training",
    (_DINO_V3, "_get_pos_embed_from_coords"): "dim periods rotate_half",
    (_DINO_V3, "get_batch_embeds"): "get_embed",
    (_MROPE, "get_embed"): "aug_active axis grid_indexing inv_freq jitter_coords rescale_coords "
    "shift_coords training",
    (_MIXED, "get_embed"): "aug_active freqs grid_indexing jitter_coords rescale_coords "
    "shift_coords t_x t_y training",
    (_MIXED, "get_batch_embeds"): "aug_active freqs get_embed grid_indexing training",
}

LIBRARY = Library(
    name="timm",
    oldest=(1, 0, 16),
    newest=(1, 0, 31),
    model_classes=("NaFlexEmbeds",),
    example="timm.create_model('naflexvit_base_patch16_gap')",
    replacements=REPLACEMENTS,
    copied_methods=COPIED_METHODS,
    notes={
        (1, 0, 30): "this timm resamples SigLIP-2's position table by bicubic; timm >= 1.0.30 by "
        "bilinear, as it was trained: one checkpoint, two results"
    },
)
