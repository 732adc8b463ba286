"""Our replacements for timm's methods. Each docstring says only how ours differs from timm's.

Each has timm's arguments after the strategy: see ``calls.Replacement``. In older releases of timm a
position table has neither an ``antialias`` nor an ``align_corners`` setting.

Tests: tests/patching/test_timm.py.
"""

# The compiler of older torch cannot evaluate the annotations of functions inside functions.
from __future__ import annotations

from typing import Any

from timm.models import naflexvit
from torch import Tensor

from ..names import MODES
from ..patch_embed import resample_kernel
from ..pos_embed import eager, graphs
from ..pos_embed.strategies import STRATEGIES
from ..pos_embed.table import INTERPOLATIONS, PositionTable, ResizeSpec, factorized_spec
from ..pos_embed.tokens import Coordinates, check_tokens
from ..rope import batched_rope, read_rope
from ..tracing import OWN_MEMORY, backend_for, why_unsupported
from .calls import Replacement
from .library import EXACT_STRATEGIES, Library, owner_of

EMBEDS, VIT = "timm.models.naflexvit:NaFlexEmbeds", "timm.models.naflexvit:NaFlexVit"
RESAMPLER = "timm.layers.patch_embed:PatchEmbedResamplerFixedOrigSize"
LEARNED_BY_FLAG = "_apply_learned_naflex_pos_embed_grid_sample"
FACTORIZED_BY_FLAG = "_apply_factorized_naflex_pos_embed_grid_sample"

# The strategy by the mode of ``pos_embed``; what is missing stays stock. NaFlex batches take the
# strategy that was chosen.
BATCH_STRATEGIES = {name: name for name in STRATEGIES}
# Models made with timm's pos_embed_use_grid_sample keep that result, which "interpolate_cached" has
# no form for.
FLAG_STRATEGIES = {"matmul": "grid_sample", "grid_sample": "grid_sample"}
# Older releases sample at other positions, from a dense affine grid, as all do for factorized tables.
SAMPLES_AT_COORDINATES = hasattr(naflexvit, "_normalize_naflex_grid_sample_coords")
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
        LEARNED_BY_FLAG: _READ_WHEN_SAMPLED,
        "_apply_learned_pos_embed": _READ_OF_LEARNED,
        "_apply_factorized_naflex_pos_embed": _READ_OF_FACTORIZED,
        FACTORIZED_BY_FLAG: _READ_OF_FACTORIZED,
        "_apply_factorized_pos_embed": _READ_OF_FACTORIZED,
    },
    RESAMPLER: {"forward": "_get_or_create_pinv_matrix orig_size"},
    VIT: {"_generate_rope_naflex": "num_prefix_tokens rope rope_is_mixed"},
    # The rotary modules, whose results ``_generate_rope_naflex`` hands on.
    "timm.layers.pos_embed_sincos:RotaryEmbeddingCat": {
        "get_embed": "_build_embed_cat _use_cached_embed aug_active bands feat_shape pos_embed "
        "training",
        "get_batch_embeds": "_build_embed_cat _use_cached_embed aug_active bands get_embed "
        "grid_type ref_feat_shape training",
        "_build_embed_cat": "_build_embed",
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
    oldest="1.0.16",
    newest="1.0.31",
    modes=MODES,
    reads=READS,
    notes={
        "1.0.29": "this timm resamples patch kernels by a function, which is not replaced",
        "1.0.30": "this timm resamples SigLIP-2's position table by bicubic; timm >= 1.0.30 by "
        "bilinear, as it was trained: one checkpoint, two results",
    },
)


def own_methods(path: str) -> dict[str, Any]:
    """The methods in ``BYPASSED`` that a class has, as timm wrote them; False for one that another
    package has replaced before."""
    methods = {}
    for name in BYPASSED.split():
        method = getattr(owner_of(path), name, None)
        if method is not None:
            methods[name] = LIBRARY.wrote(method) and method
    return methods


# What timm's own code calls there, in any release, and ours does not.
BYPASSED = (
    "_get_or_create_pinv_matrix get_batch_embeds get_embed _build_embed_cat _build_embed "
    "_create_embed _get_pos_embed_from_coords"
)
METHODS = {path: own_methods(path) for path in READS}


def overridden(module: Any, path: str) -> str | None:
    """In words, that a method of a module of this class is not timm's own; None if all are.

    Asked in each call (1 us), because somebody may put a method on one instance at any time.
    """
    cls = type(module)
    for name, timms in METHODS[path].items():
        # The class first: a proxy there equals what it wraps.
        if getattr(cls, name) is not timms or getattr(module, name) != timms.__get__(module):
            return f"{cls.__name__}, whose {name} is not timm's own,"
    return None


def read_embeds(embeds: Any, *, samples: bool = False) -> tuple[PositionTable, ResizeSpec]:
    """The position table of a NaFlexEmbeds, in one part or two, and how timm resizes it.

    Each parameter is read once: a parametrization computes it at each reading.

    Args:
        embeds: the module.
        samples: with its flag pos_embed_use_grid_sample, whatever it has.

    Raises:
        ValueError: it has no table.
    """
    preserving = embeds.pos_embed_ar_preserving
    table = embeds.pos_embed
    if table is not None:
        # Older releases of timm lack two of these settings. The flag has no filter to widen.
        antialias = not samples and getattr(embeds, "pos_embed_antialias", True)
        align_corners = getattr(embeds, "pos_embed_align_corners", False)
        mode = embeds.pos_embed_interp_mode
        spec = ResizeSpec(mode, antialias, align_corners, preserving, samples, samples)
        return (table,), spec
    rows = embeds.pos_embed_y
    if rows is not None:
        return (rows, embeds.pos_embed_x), factorized_spec(preserving)
    raise ValueError("the model has no position table, learned or factorized: nothing is resampled")


def _adds(name: str, strategies: dict[str, str], *, by_flag: str = "") -> Replacement:
    """``by_flag``: timm's method with the result of the mode "grid_sample", if it is another."""
    own = {"grid_sample": (EMBEDS, by_flag or name)}
    return Replacement(LIBRARY, (EMBEDS, name), "pos_embed", strategies, own)


@_adds(LEARNED_BY_FLAG, FLAG_STRATEGIES)
@_adds("_apply_learned_naflex_pos_embed", BATCH_STRATEGIES, by_flag=LEARNED_BY_FLAG)
def add_to_batch(strategy: str, self: Any, x: Tensor, patch_coord: Coordinates) -> str | None:
    """Modifications: the chosen strategy; a token gets the cell its own coordinate names."""
    samples = strategy == "grid_sample"
    if samples and not SAMPLES_AT_COORDINATES:
        return ""
    table, spec = read_embeds(self, samples=samples)
    if spec.interpolation not in (*INTERPOLATIONS, "linear"):
        return f"a position table with interpolation mode {spec.interpolation!r}"
    tensors = (x, *table)
    if isinstance(patch_coord, Tensor):
        tensors += (patch_coord,)
    backend = backend_for(*tensors)
    if backend == "eager":  # in which there is nothing that ours cannot take
        eager.add(x, table, patch_coord, spec, strategy)
        return None
    reason = why_unsupported(*tensors)
    if reason is None:
        graphs.add(x, table, patch_coord, spec, strategy, backend)
    return reason


@_adds(FACTORIZED_BY_FLAG, FLAG_STRATEGIES)
@_adds("_apply_factorized_naflex_pos_embed", BATCH_STRATEGIES, by_flag=FACTORIZED_BY_FLAG)
def add_factorized_to_batch(strategy: str, self: Any, x: Tensor, patch_coord: Tensor) -> str | None:
    """Modifications: as in add_to_batch; timm's flag, which has no loop, is timm's own."""
    if strategy == "grid_sample":
        return ""
    return add_to_batch(strategy, self, x, patch_coord)


@_adds("_apply_learned_pos_embed", IMAGE_STRATEGIES)
@_adds("_apply_factorized_pos_embed", IMAGE_STRATEGIES)
def add_to_images(strategy: str, self: Any, x: Tensor, grid_size: Any) -> str | None:
    """Modifications: the chosen strategy, "matmul" for "grid_sample"."""
    return add_to_batch(strategy, self, x, tuple(grid_size))


@Replacement(LIBRARY, (RESAMPLER, "forward"), "patch_embed", KERNEL_STRATEGIES)
def resampler_forward(strategy: str, self: Any, patch_embed: Tensor, new_size: Any) -> Tensor | str:
    """Modifications: two 1-D pseudo-inverses; these and a frozen kernel are kept."""
    if self.interpolation not in INTERPOLATIONS:
        return f"a patch kernel with interpolation mode {self.interpolation!r}"
    reason = overridden(self, RESAMPLER) or why_unsupported(patch_embed)
    if reason is not None:
        return reason
    size = tuple(new_size)
    return resample_kernel(patch_embed, size, self.interpolation, self.antialias, may_keep=True)


if hasattr(naflexvit.NaFlexVitCfg, "rope_type"):  # not in timm 1.0.16

    @Replacement(LIBRARY, (VIT, "_generate_rope_naflex"), "rope", {"batched": "batched"})
    def generate_rope(strategy: str, self: Any, x: Tensor, patch_coord: Tensor) -> Any:
        """Modifications: the whole batch at once; a token gets the cell its coordinate names."""
        rope = read_rope(self.rope)
        if isinstance(rope, str):
            return rope
        reason = overridden(self.rope, f"timm.layers.pos_embed_sincos:{type(self.rope).__name__}")
        if reason is None and type(patch_coord) not in OWN_MEMORY:
            reason = why_unsupported(patch_coord)
        if reason is not None:
            return reason
        traceable = backend_for(x, patch_coord) != "eager"
        if not traceable:
            check_tokens(x[:, self.num_prefix_tokens :], x.shape[-1], patch_coord)
        return batched_rope(rope, patch_coord.to(x.device), x.dtype, traceable=traceable)
