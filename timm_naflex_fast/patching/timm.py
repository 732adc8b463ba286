"""Our replacements for timm's methods. Each docstring says only how ours differs from timm's.

Each hands its call to ``serve``, which asks ``REPLACEMENTS`` at the end of the file. In older
releases of timm a position table has neither an ``antialias`` nor an ``align_corners`` setting, and
an interpolator no ``resampler``.
"""

from collections.abc import Callable, Iterable
from typing import Any

from timm.layers.patch_embed import PatchEmbedResamplerFixedOrigSize
from timm.models import naflexvit
from torch import Tensor

from ..backends import dispatch
from ..batch.checks import InvalidCoordinateError
from ..batch.layout import Coordinates, OneGrid, check_tokens
from ..patch_embed.kernels import resample_linear_kernel, resample_patch_kernel
from ..resampling.spec import FLAG, INTERPOLATIONS, LOOP, OLDER_FLAG, ResizeSpec
from ..resampling.tables import FactorizedTables, LearnedTable, Tables
from ..rope.batched import batched_rope
from ..rope.modules import read_rope
from ..strategies import STRATEGIES
from ..tracing import OWN_MEMORY, Context, context_of, why_unsupported
from .choices import MODES
from .decide import serve
from .library import EXACT_STRATEGIES, Key, Library, Replacement, original

EMBEDS, VIT = "timm.models.naflexvit:NaFlexEmbeds", "timm.models.naflexvit:NaFlexVit"
INTERPOLATOR = "timm.layers.patch_embed:PatchEmbedInterpolator"
RESAMPLER = "timm.layers.patch_embed:PatchEmbedResamplerFixedOrigSize"
FUNCTIONS = "timm.layers.patch_embed:"
# Older releases take the positions of their pos_embed_use_grid_sample from a dense affine grid.
TIMM_FLAG = OLDER_FLAG
if hasattr(naflexvit, "_normalize_naflex_grid_sample_coords"):
    TIMM_FLAG = FLAG


# By ``pos_embed_type``: the kind of its tables, and the names of its parameters.
TABLES: dict[str, tuple[type[Tables], tuple[str, ...]]] = {
    "learned": (LearnedTable, ("pos_embed",)),
    "factorized": (FactorizedTables, ("pos_embed_y", "pos_embed_x")),
}


# Two functions, because ``releases`` compares the names of their arguments with those of timm's.
def _by_coordinates(key: Key, table_type: str) -> Callable[..., None]:
    """The replacement of a method for NaFlex batches."""

    def add_by_coordinates(self: Any, x: Tensor, patch_coord: Tensor) -> None:
        """Modifications: the chosen strategy; a token gets the cell its own coordinate names."""
        _add(key, table_type, self, x, patch_coord)

    return add_by_coordinates


def _by_grid_size(key: Key, table_type: str) -> Callable[..., None]:
    """The replacement of a method for plain images."""

    def add_by_grid_size(self: Any, x: Tensor, grid_size: Any) -> None:
        """Modifications: the chosen strategy, "matmul" for "grid_sample"; two products in a graph."""
        _add(key, table_type, self, x, grid_size)

    return add_by_grid_size


def _add(key: Key, table_type: str, embeds: Any, x: Tensor, layout: Any) -> None:
    """Add the tables, resampled as chosen."""
    kind, names = TABLES[table_type]

    def ours(strategy_name: str, values: tuple[Tensor, ...], context: Context) -> str | None:
        strategy = STRATEGIES[strategy_name]
        tables = kind(values)
        spec = resize_spec(embeds, tables, by_flag=strategy.reference.samples)
        if spec.interpolation not in tables.interpolations:
            valid = ", ".join(tables.interpolations)
            return (
                f"a position table (replaced are {valid}) with interpolation mode "
                f"{spec.interpolation!r}"
            )
        where = Coordinates(layout) if isinstance(layout, Tensor) else OneGrid(*layout)
        try:
            dispatch.add(x, tables, where, spec, strategy, context)
        except InvalidCoordinateError:
            if not spec.reference.samples:
                raise
            # timm's grid_sample flag samples wherever a coordinate lies.
            return "coordinates that name no cell"
        return None

    tensors = (x, layout) if isinstance(layout, Tensor) else (x,)
    arguments = embeds, x, layout
    serve(LIBRARY, key, arguments, ours, *tensors, tables_at=(embeds, *names))


def tables_of(embeds: Any) -> Tables | None:
    """The position tables of a NaFlexEmbeds; None if it has none."""
    if embeds.pos_embed_type not in TABLES:
        return None
    kind, names = TABLES[embeds.pos_embed_type]
    return kind(tuple(getattr(embeds, name) for name in names))


def resize_spec(embeds: Any, tables: Tables, *, by_flag: bool) -> ResizeSpec:
    """How a NaFlexEmbeds resizes its tables: by its flag pos_embed_use_grid_sample, or without."""
    spec = ResizeSpec(
        embeds.pos_embed_interp_mode,
        # Older releases of timm lack these two settings.
        getattr(embeds, "pos_embed_antialias", True),
        getattr(embeds, "pos_embed_align_corners", False),
        embeds.pos_embed_ar_preserving,
        TIMM_FLAG if by_flag else LOOP,
    )
    return tables.spec_of(spec)


def _generate_rope_naflex(self: Any, x: Tensor, patch_coord: Tensor) -> Any:
    """Modifications: the whole batch at once; a token gets the cell its own coordinate names."""
    rope: Any = read_rope(self.rope)
    reason = None
    if isinstance(rope, str):
        reason = rope
    elif type(patch_coord) not in OWN_MEMORY:
        reason = why_unsupported(patch_coord)

    def ours(*_: Any) -> Tensor | Iterable[Tensor]:
        traceable = context_of(x, patch_coord) not in (None, "capture", "other_device")
        check_tokens(x[:, self.num_prefix_tokens :], x.shape[-1], patch_coord)
        return batched_rope(rope, patch_coord.to(x.device), x.dtype, traceable=traceable)

    key = VIT, "_generate_rope_naflex"
    return serve(LIBRARY, key, (self, x, patch_coord), ours, reason=reason)


def resample_linear_weight(self: Any, weight: Tensor, target_patch_size: Any) -> Tensor:
    """Modifications: separable; a frozen weight's kernel is kept."""
    key = INTERPOLATOR, "resample_linear_weight"
    arguments = self, weight, target_patch_size
    base_size: Any = tuple(self.base_patch_size)
    size: Any = tuple(target_patch_size)
    # In newer releases of timm it has the settings; in older ones the interpolator has them.
    resampler = getattr(self, "resampler", self)
    is_known = type(resampler) in (type(self), PatchEmbedResamplerFixedOrigSize)
    if size == base_size or not is_known:
        return original(key)(*arguments)

    def ours(*_: Any) -> Tensor:
        channels_last = getattr(self, "channels_last", True)
        options = self.in_chans, channels_last, resampler.interpolation, resampler.antialias
        return resample_linear_kernel(weight, base_size, size, *options)

    reason = _unknown_mode(resampler.interpolation)
    return serve(LIBRARY, key, arguments, ours, weight, reason=reason)


def resampler_forward(self: Any, patch_embed: Tensor, new_size: Any) -> Tensor:
    """Modifications: two 1-D pseudo-inverses, kept across models and calls."""
    arguments = self, patch_embed, new_size
    how = self.interpolation, self.antialias
    return _resampled((RESAMPLER, "forward"), arguments, patch_embed, new_size, *how)


def resample_patch_embed(
    patch_embed: Tensor,
    new_size: Any,
    interpolation: str = "bicubic",
    antialias: bool = True,
    verbose: bool = False,
) -> Tensor:
    """Modifications: as in resampler_forward."""
    key = FUNCTIONS, "resample_patch_embed"
    how = interpolation, antialias
    arguments = patch_embed, new_size, *how, verbose
    return _resampled(key, arguments, patch_embed, new_size, *how)


def _resampled(
    key: Key,
    arguments: Any,
    weight: Tensor,
    size: Any,
    interpolation: str,
    antialias: bool,
) -> Tensor:
    """The resampled kernel of a convolution, as chosen."""

    def ours(*_: Any) -> Tensor:
        return resample_patch_kernel(weight, tuple(size), mode=interpolation, antialias=antialias)

    reason = _unknown_mode(interpolation)
    return serve(LIBRARY, key, arguments, ours, weight, reason=reason)


def _unknown_mode(interpolation: str) -> str | None:
    """Why timm's own code has to resample a patch kernel, if it has to."""
    if interpolation in INTERPOLATIONS:
        return None
    return f"a patch kernel with interpolation mode {interpolation!r}"


# The strategy by the mode of ``pos_embed``; what is missing stays stock. NaFlex batches take the
# strategy that was chosen.
BATCH_STRATEGIES = {name: name for name in STRATEGIES}
# Models made with timm's pos_embed_use_grid_sample keep that result.
FLAG_STRATEGIES: dict[str, str] = {}
for _name, _strategy in STRATEGIES.items():
    if _strategy.for_grid_sample:
        FLAG_STRATEGIES[_name] = _strategy.for_grid_sample
# That setting does not change plain images: timm resizes their table by F.interpolate all the same.
IMAGE_STRATEGIES = {**EXACT_STRATEGIES, "grid_sample": "matmul"}

_OWN_INVERSE = "_get_or_create_pinv_matrix"


REPLACEMENTS: dict[Key, Replacement] = {}
for _type in TABLES:
    _naflex = EMBEDS, f"_apply_{_type}_naflex_pos_embed"
    _sampled = EMBEDS, f"_apply_{_type}_naflex_pos_embed_grid_sample"
    _plain = EMBEDS, f"_apply_{_type}_pos_embed"
    REPLACEMENTS[_naflex] = Replacement(
        component="pos_embed",
        function=_by_coordinates(_naflex, _type),
        strategies=BATCH_STRATEGIES,
        own={"grid_sample": _sampled},
    )
    REPLACEMENTS[_sampled] = Replacement(
        component="pos_embed",
        function=_by_coordinates(_sampled, _type),
        strategies=FLAG_STRATEGIES,
    )
    REPLACEMENTS[_plain] = Replacement(
        component="pos_embed",
        function=_by_grid_size(_plain, _type),
        strategies=IMAGE_STRATEGIES,
    )
REPLACEMENTS |= {
    (INTERPOLATOR, "resample_linear_weight"): Replacement(
        component="patch_embed",
        function=resample_linear_weight,
        strategies={"matmul": "matmul"},
        skips=("resampler.forward", f"resampler.{_OWN_INVERSE}"),
        counts_own=False,
    ),
    (RESAMPLER, "forward"): Replacement(
        component="patch_embed",
        function=resampler_forward,
        strategies={"matmul": "matmul"},
        skips=(_OWN_INVERSE,),
    ),
    (FUNCTIONS, "resample_patch_embed"): Replacement(
        component="patch_embed",
        function=resample_patch_embed,
        strategies={"matmul": "matmul"},
    ),
}
if hasattr(naflexvit.NaFlexVitCfg, "rope_type"):  # not in timm 1.0.16
    REPLACEMENTS[VIT, "_generate_rope_naflex"] = Replacement(
        component="rope",
        function=_generate_rope_naflex,
        strategies={"batched": "batched"},
        skips=(
            "rope.get_batch_embeds",
            "rope.get_embed",
            "rope._build_embed_cat",
            "rope._build_embed",
            "rope._create_embed",
            "rope._get_pos_embed_from_coords",
        ),
    )

_SAMPLED = "pos_embed pos_embed_align_corners pos_embed_ar_preserving pos_embed_interp_mode"
_LEARNED = f"{_SAMPLED} pos_embed_antialias"
_FACTORIZED = "pos_embed_ar_preserving pos_embed_x pos_embed_y"
# What each method names of ``self``, in the newest release that we know (``newest`` below). In a
# release after it, another set of names is an error: see ``releases``. To raise ``newest``, read the
# new release's methods, and write down here what changed.
READS = {
    EMBEDS: {
        "_apply_learned_naflex_pos_embed": _LEARNED,
        "_apply_learned_naflex_pos_embed_grid_sample": _SAMPLED,
        "_apply_learned_pos_embed": _LEARNED,
        "_apply_factorized_naflex_pos_embed": _FACTORIZED,
        "_apply_factorized_naflex_pos_embed_grid_sample": _FACTORIZED,
        "_apply_factorized_pos_embed": _FACTORIZED,
    },
    INTERPOLATOR: {
        "resample_linear_weight": "base_patch_size channels_last in_chans resampler",
        # This one calls it.
        "forward": "base_patch_size resample_conv_weight resample_linear_weight",
    },
    RESAMPLER: {"forward": f"{_OWN_INVERSE} orig_size"},
    VIT: {"_generate_rope_naflex": "num_prefix_tokens rope rope_is_mixed"},
    # The rotary modules, whose results ``_generate_rope_naflex`` hands on.
    "timm.layers.pos_embed_sincos:RotaryEmbeddingCat": {
        "get_embed": "_build_embed_cat _use_cached_embed aug_active bands feat_shape pos_embed "
        "training",
        "get_batch_embeds": "_build_embed_cat _use_cached_embed aug_active bands get_embed "
        "grid_type ref_feat_shape training",
    },
    "timm.layers.pos_embed_sincos:RotaryEmbeddingDinoV3": {
        "_create_embed": "_get_pos_embed_from_coords aug_active grid_indexing grid_offset "
        "jitter_coords normalize_coords rescale_coords shift_coords training",
        "_get_pos_embed_from_coords": "dim periods rotate_half",
        "get_batch_embeds": "get_embed",
    },
    "timm.layers.pos_embed_sincos:RotaryEmbeddingMRope": {
        "get_embed": "aug_active axis grid_indexing inv_freq jitter_coords rescale_coords "
        "shift_coords training",
    },
    "timm.layers.pos_embed_sincos:RotaryEmbeddingMixed": {
        "get_embed": "aug_active freqs grid_indexing jitter_coords rescale_coords shift_coords "
        "t_x t_y training",
        "get_batch_embeds": "aug_active freqs get_embed grid_indexing training",
    },
}

LIBRARY = Library(
    name="timm",
    oldest=(1, 0, 16),
    newest=(1, 0, 31),
    modes=MODES,
    replacements=REPLACEMENTS,
    reads=READS,
    notes={
        (1, 0, 30): "this timm resamples SigLIP-2's position table by bicubic; timm >= 1.0.30 by "
        "bilinear, as it was trained: one checkpoint, two results"
    },
)
