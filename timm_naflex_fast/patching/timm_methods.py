"""Our replacements for timm's methods. Each docstring says only how ours differs from timm's.

Each hands its call to ``serve``, with the ``Replacement`` that says how ours computes. In older
releases of timm a position table has neither an ``antialias`` nor an ``align_corners`` setting, and
an interpolator no ``resampler``.

Tests: tests/patching/test_timm.py.
"""

# The compiler of older torch cannot evaluate the annotations of functions inside functions.
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from timm.layers.patch_embed import PatchEmbedResamplerFixedOrigSize
from timm.models import naflexvit
from torch import Tensor

from ..backends import dispatch
from ..batch.checks import InvalidCoordinateError
from ..batch.layout import Coordinates, OneGrid, check_tokens
from ..patch_embed.kernels import resample_linear_kernel, resample_patch_kernel
from ..resampling.spec import (
    FLAG,
    INTERPOLATIONS,
    LOOP,
    OLDER_FLAG,
    ResizeSpec,
    factorized_spec,
    learned_spec,
)
from ..resampling.tables import PositionTable
from ..rope.batched import batched_rope
from ..rope.modules import read_rope
from ..strategies import STRATEGIES
from ..tracing import OWN_MEMORY, Context, context_of, why_unsupported
from .choices import MODES
from .decide import serve
from .library import EXACT_STRATEGIES, Library, Replacement, original

EMBEDS, VIT = "timm.models.naflexvit:NaFlexEmbeds", "timm.models.naflexvit:NaFlexVit"
INTERPOLATOR = "timm.layers.patch_embed:PatchEmbedInterpolator"
RESAMPLER = "timm.layers.patch_embed:PatchEmbedResamplerFixedOrigSize"
FUNCTIONS = "timm.layers.patch_embed:"
# Older releases take the positions of their pos_embed_use_grid_sample from a dense affine grid.
TIMM_FLAG = OLDER_FLAG
if hasattr(naflexvit, "_normalize_naflex_grid_sample_coords"):
    TIMM_FLAG = FLAG

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
KERNEL_STRATEGIES = {"matmul": "matmul"}

_READ_WHEN_SAMPLED = (
    "pos_embed pos_embed_align_corners pos_embed_ar_preserving pos_embed_interp_mode"
)
_READ_OF_LEARNED = f"{_READ_WHEN_SAMPLED} pos_embed_antialias"
_READ_OF_FACTORIZED = "pos_embed_ar_preserving pos_embed_x pos_embed_y"
# What each method names of ``self``, in the newest release that we know (``newest`` below). In a
# release after it, another set of names is an error: see ``releases``. To raise ``newest``, read the
# new release's methods, and write down here what changed.
READS = {
    EMBEDS: {
        "_apply_learned_naflex_pos_embed": _READ_OF_LEARNED,
        "_apply_learned_naflex_pos_embed_grid_sample": _READ_WHEN_SAMPLED,
        "_apply_learned_pos_embed": _READ_OF_LEARNED,
        "_apply_factorized_naflex_pos_embed": _READ_OF_FACTORIZED,
        "_apply_factorized_naflex_pos_embed_grid_sample": _READ_OF_FACTORIZED,
        "_apply_factorized_pos_embed": _READ_OF_FACTORIZED,
    },
    INTERPOLATOR: {
        "resample_linear_weight": "base_patch_size channels_last in_chans resampler",
        # This one calls it.
        "forward": "base_patch_size resample_conv_weight resample_linear_weight",
    },
    RESAMPLER: {"forward": "_get_or_create_pinv_matrix orig_size"},
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
    reads=READS,
    notes={
        (1, 0, 30): "this timm resamples SigLIP-2's position table by bicubic; timm >= 1.0.30 by "
        "bilinear, as it was trained: one checkpoint, two results"
    },
)


def resize_spec(embeds: Any, table: PositionTable, *, by_flag: bool) -> ResizeSpec:
    """How a NaFlexEmbeds resizes its tables: by its flag pos_embed_use_grid_sample, or without."""
    reference = TIMM_FLAG if by_flag else LOOP
    if len(table.parts) == 2:
        return factorized_spec(embeds.pos_embed_ar_preserving, reference)
    return learned_spec(
        embeds.pos_embed_interp_mode,
        # Older releases of timm lack these two settings.
        getattr(embeds, "pos_embed_antialias", True),
        getattr(embeds, "pos_embed_align_corners", False),
        embeds.pos_embed_ar_preserving,
        reference,
    )


class AddTables(Replacement):
    """A method (embeds, x, layout) that adds resampled tables to tokens. The layout is
    ``patch_coord`` or, of plain images, ``grid_size``."""

    component = "pos_embed"
    table_type: str  # timm's ``pos_embed_type``
    names: tuple[str, ...]  # of the module's tables

    def __init__(
        self, method: str, strategies: Mapping[str, str], own_by_flag: str | None = None
    ) -> None:
        """``own_by_flag``: timm's method with the result of the mode "grid_sample"."""
        own = {}
        if own_by_flag is not None:
            own["grid_sample"] = EMBEDS, own_by_flag
        super().__init__(LIBRARY, (EMBEDS, method), strategies, own=own)

    def tensors(self, *arguments: Any) -> tuple[Tensor, ...]:
        """The tokens, the layout if it is a tensor, and the tables."""
        embeds, x, layout = arguments
        tensors: tuple[Tensor, ...] = (x, layout) if isinstance(layout, Tensor) else (x,)
        for name in self.names:
            tensors += (getattr(embeds, name),)
        return tensors

    def compute(
        self, strategy: str, context: Context, tensors: tuple[Tensor, ...], *arguments: Any
    ) -> str | None:
        """Add the tables, resampled as chosen."""
        embeds, x, layout = arguments
        chosen = STRATEGIES[strategy]
        table = PositionTable(tensors[-len(self.names) :])
        spec = resize_spec(embeds, table, by_flag=chosen.reference != LOOP)
        if spec.interpolation not in (*INTERPOLATIONS, "linear"):
            valid = ", ".join(INTERPOLATIONS)
            return (
                f"a position table (replaced are {valid}) with interpolation mode "
                f"{spec.interpolation!r}"
            )
        where = Coordinates(layout) if isinstance(layout, Tensor) else OneGrid(*layout)
        try:
            dispatch.add(x, table, where, spec, chosen, context)
        except InvalidCoordinateError:
            if not spec.samples:
                raise
            # timm's grid_sample flag samples wherever a coordinate lies.
            return "coordinates that name no cell"
        return None


class AddLearned(AddTables):
    """Adds one table of cells."""

    table_type = "learned"
    names = ("pos_embed",)


class AddFactorized(AddTables):
    """Adds a table of rows and one of columns."""

    table_type = "factorized"
    names = ("pos_embed_y", "pos_embed_x")


def tables_of(embeds: Any) -> PositionTable | None:
    """The position table of a NaFlexEmbeds, in one part or two; None if it has none."""
    for adds in (AddLearned, AddFactorized):
        if embeds.pos_embed_type == adds.table_type:
            return PositionTable(tuple(getattr(embeds, name) for name in adds.names))
    return None


class GenerateRope(Replacement):
    """The method (vit, x, patch_coord) that gives the rotary embeddings of a NaFlex batch."""

    component = "rope"

    def why_not(self, *arguments: Any) -> str | None:
        """Rotary modules and coordinates that ours cannot take."""
        vit, _, patch_coord = arguments
        rope = read_rope(vit.rope)
        if isinstance(rope, str):
            return rope
        if type(patch_coord) not in OWN_MEMORY:
            return why_unsupported(patch_coord)
        return None

    def compute(
        self, strategy: str, context: Context, tensors: tuple[Tensor, ...], *arguments: Any
    ) -> Any:
        """All embeddings at once."""
        vit, x, patch_coord = arguments
        traceable = context_of(x, patch_coord) not in (None, "capture", "other_device")
        check_tokens(x[:, vit.num_prefix_tokens :], x.shape[-1], patch_coord)
        rope: Any = read_rope(vit.rope)
        return batched_rope(rope, patch_coord.to(x.device), x.dtype, traceable=traceable)


class ResampleKernel(Replacement):
    """A method (resampler, kernel, size) that resamples the kernel of a convolution."""

    component = "patch_embed"

    def settings(self, *arguments: Any) -> tuple[Tensor, Any, str, bool]:
        """The kernel, the new size, the interpolation, and whether it is antialiased."""
        resampler, kernel, size = arguments
        return kernel, size, resampler.interpolation, resampler.antialias

    def why_not(self, *arguments: Any) -> str | None:
        """Modes that ours has not."""
        _, _, interpolation, _ = self.settings(*arguments)
        if interpolation in INTERPOLATIONS:
            return None
        return f"a patch kernel with interpolation mode {interpolation!r}"

    def tensors(self, *arguments: Any) -> tuple[Tensor, ...]:
        """The kernel."""
        kernel, *_ = self.settings(*arguments)
        return (kernel,)

    def compute(
        self, strategy: str, context: Context, tensors: tuple[Tensor, ...], *arguments: Any
    ) -> Tensor:
        """The resampled kernel."""
        kernel, size, interpolation, antialias = self.settings(*arguments)
        return resample_patch_kernel(kernel, tuple(size), mode=interpolation, antialias=antialias)


class ResampleByFunction(ResampleKernel):
    """The same by a function, which has its settings as arguments."""

    def settings(self, *arguments: Any) -> tuple[Tensor, Any, str, bool]:
        """Of the arguments."""
        kernel, size, interpolation, antialias, _ = arguments
        return kernel, size, interpolation, antialias


class ResampleLinear(ResampleKernel):
    """The same of a linear layer's weight, by (interpolator, weight, size)."""

    counts_own = False  # timm's calls the resampler

    def settings(self, *arguments: Any) -> tuple[Tensor, Any, str, bool]:
        """Of the interpolator's resampler."""
        interpolator, weight, size = arguments
        return super().settings(resampler_of(interpolator), weight, size)

    def compute(
        self, strategy: str, context: Context, tensors: tuple[Tensor, ...], *arguments: Any
    ) -> Tensor:
        """The resampled weight."""
        interpolator = arguments[0]
        weight, size, interpolation, antialias = self.settings(*arguments)
        return resample_linear_kernel(
            weight,
            tuple(interpolator.base_patch_size),
            tuple(size),
            interpolator.in_chans,
            getattr(interpolator, "channels_last", True),
            interpolation,
            antialias,
        )


def resampler_of(interpolator: Any) -> Any:
    """Who has the settings: in newer releases of timm its resampler, in older ones itself."""
    return getattr(interpolator, "resampler", interpolator)


_LEARNED_BY_FLAG = AddLearned("_apply_learned_naflex_pos_embed_grid_sample", FLAG_STRATEGIES)
_LEARNED = AddLearned("_apply_learned_naflex_pos_embed", BATCH_STRATEGIES, _LEARNED_BY_FLAG.key[1])
_LEARNED_PLAIN = AddLearned("_apply_learned_pos_embed", IMAGE_STRATEGIES)
_FACTORIZED_BY_FLAG = AddFactorized(
    "_apply_factorized_naflex_pos_embed_grid_sample", FLAG_STRATEGIES
)
_FACTORIZED = AddFactorized(
    "_apply_factorized_naflex_pos_embed", BATCH_STRATEGIES, _FACTORIZED_BY_FLAG.key[1]
)
_FACTORIZED_PLAIN = AddFactorized("_apply_factorized_pos_embed", IMAGE_STRATEGIES)


@_LEARNED
def add_learned(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: the chosen strategy; a token gets the cell its own coordinate names."""
    serve(_LEARNED, self, x, patch_coord)


@_LEARNED_BY_FLAG
def add_learned_by_flag(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: as in add_learned."""
    serve(_LEARNED_BY_FLAG, self, x, patch_coord)


@_LEARNED_PLAIN
def add_learned_plain(self: Any, x: Tensor, grid_size: Any) -> None:
    """Modifications: the chosen strategy, "matmul" for "grid_sample"; two products in a graph."""
    serve(_LEARNED_PLAIN, self, x, grid_size)


@_FACTORIZED
def add_factorized(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: as in add_learned."""
    serve(_FACTORIZED, self, x, patch_coord)


@_FACTORIZED_BY_FLAG
def add_factorized_by_flag(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: as in add_learned."""
    serve(_FACTORIZED_BY_FLAG, self, x, patch_coord)


@_FACTORIZED_PLAIN
def add_factorized_plain(self: Any, x: Tensor, grid_size: Any) -> None:
    """Modifications: as in add_learned_plain."""
    serve(_FACTORIZED_PLAIN, self, x, grid_size)


_OWN_INVERSE = "_get_or_create_pinv_matrix"
_LINEAR = ResampleLinear(
    LIBRARY,
    (INTERPOLATOR, "resample_linear_weight"),
    KERNEL_STRATEGIES,
    skips=("resampler.forward", f"resampler.{_OWN_INVERSE}"),
)
_RESAMPLER = ResampleKernel(
    LIBRARY, (RESAMPLER, "forward"), KERNEL_STRATEGIES, skips=(_OWN_INVERSE,)
)
_FUNCTION = ResampleByFunction(LIBRARY, (FUNCTIONS, "resample_patch_embed"), KERNEL_STRATEGIES)


@_LINEAR
def resample_linear_weight(self: Any, weight: Tensor, target_patch_size: Any) -> Tensor:
    """Modifications: separable; a frozen weight's kernel is kept."""
    is_known = type(resampler_of(self)) in (type(self), PatchEmbedResamplerFixedOrigSize)
    if not is_known or tuple(target_patch_size) == tuple(self.base_patch_size):
        own: Tensor = original(_LINEAR.key)(self, weight, target_patch_size)
        return own
    resampled: Tensor = serve(_LINEAR, self, weight, target_patch_size)
    return resampled


@_RESAMPLER
def resampler_forward(self: Any, patch_embed: Tensor, new_size: Any) -> Any:
    """Modifications: two 1-D pseudo-inverses, kept across models and calls."""
    return serve(_RESAMPLER, self, patch_embed, new_size)


@_FUNCTION
def resample_patch_embed(
    patch_embed: Tensor,
    new_size: Any,
    interpolation: str = "bicubic",
    antialias: bool = True,
    verbose: bool = False,
) -> Any:
    """Modifications: as in resampler_forward."""
    return serve(_FUNCTION, patch_embed, new_size, interpolation, antialias, verbose)


if hasattr(naflexvit.NaFlexVitCfg, "rope_type"):  # not in timm 1.0.16
    _ROPE = GenerateRope(
        LIBRARY,
        (VIT, "_generate_rope_naflex"),
        {"batched": "batched"},
        skips=(
            "rope.get_batch_embeds",
            "rope.get_embed",
            "rope._build_embed_cat",
            "rope._build_embed",
            "rope._create_embed",
            "rope._get_pos_embed_from_coords",
        ),
    )

    @_ROPE
    def generate_rope(self: Any, x: Tensor, patch_coord: Tensor) -> Any:
        """Modifications: the whole batch at once; a token gets the cell its coordinate names."""
        return serve(_ROPE, self, x, patch_coord)
