"""What timm's replaced methods must be: their arguments, and, in a timm newer than any known, what they read.

A method that reads another attribute of its module than it used to has gained or lost a setting, and a method that
nobody calls any more has been superseded. Replacing either would change results without a word, so it is refused.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

OLDEST_TIMM = (1, 0, 16)
NEWEST_KNOWN_TIMM = (1, 0, 31)

Methods = Mapping[Any, Mapping[str, Callable[..., Any]]]
"""Our functions by timm's names, for each class (or module) of timm's."""

_LEARNED = "pos_embed pos_embed_align_corners pos_embed_ar_preserving pos_embed_interp_mode"
_FACTORIZED = "pos_embed_ar_preserving pos_embed_x pos_embed_y"
# What timm 1.0.31 reads of ``self`` in each method that is replaced, ...
READS: dict[str, str] = {
    "NaFlexEmbeds._apply_learned_naflex_pos_embed": f"{_LEARNED} pos_embed_antialias",
    "NaFlexEmbeds._apply_learned_naflex_pos_embed_grid_sample": _LEARNED,
    "NaFlexEmbeds._apply_learned_pos_embed": f"{_LEARNED} pos_embed_antialias",
    "NaFlexEmbeds._apply_factorized_naflex_pos_embed": _FACTORIZED,
    "NaFlexEmbeds._apply_factorized_naflex_pos_embed_grid_sample": _FACTORIZED,
    "NaFlexEmbeds._apply_factorized_pos_embed": _FACTORIZED,
    "NaFlexVit._generate_rope_naflex": "num_prefix_tokens rope rope_is_mixed",
    "PatchEmbedInterpolator.resample_linear_weight": "base_patch_size channels_last in_chans resampler",
    "PatchEmbedInterpolator.resample_conv_weight": "base_patch_size resampler",
    "PatchEmbedInterpolator.forward": "base_patch_size resample_conv_weight resample_linear_weight",
    "PatchEmbedInterpolator.prewarm": "resampler",
    "PatchEmbedResamplerFixedOrigSize.forward": "_get_or_create_pinv_matrix orig_size",
    "PatchEmbedResamplerFixedOrigSize.prewarm": "_cache_device_anchor _get_or_create_pinv_matrix orig_size",
}
_AUGMENTED = "aug_active training shift_coords jitter_coords rescale_coords"
# ... and in the methods of its rotary modules whose results ``_generate_rope_naflex`` hands on.
ROPE_READS: dict[str, str] = {
    "RotaryEmbeddingCat.get_embed": "_build_embed_cat _use_cached_embed aug_active bands feat_shape pos_embed training",
    "RotaryEmbeddingCat.get_batch_embeds": "_build_embed_cat _use_cached_embed aug_active bands get_embed grid_type "
    "ref_feat_shape training",
    "RotaryEmbeddingDinoV3._create_embed": f"{_AUGMENTED} _get_pos_embed_from_coords grid_indexing grid_offset "
    "normalize_coords",
    "RotaryEmbeddingDinoV3._get_pos_embed_from_coords": "dim periods rotate_half",
    "RotaryEmbeddingDinoV3.get_batch_embeds": "get_embed",
    "RotaryEmbeddingMRope.get_embed": f"{_AUGMENTED} axis grid_indexing inv_freq",
    "RotaryEmbeddingMixed.get_embed": f"{_AUGMENTED} freqs grid_indexing t_x t_y",
    "RotaryEmbeddingMixed.get_batch_embeds": "aug_active freqs get_embed grid_indexing training",
}


def installed_timm() -> tuple[int, ...]:
    """The first three numbers of timm's version.

    Raises:
        RuntimeError: older than 1.0.16.
    """
    import timm

    found = tuple(int(n) for n in re.findall(r"\d+", timm.__version__)[:3])
    if found < OLDEST_TIMM:
        oldest = ".".join(map(str, OLDEST_TIMM))
        raise RuntimeError(f"timm_naflex_fast needs timm >= {oldest}; installed is {timm.__version__}")
    return found


def check_arguments(methods: Methods, optional: Iterable[str] = ()) -> None:
    """Raise RuntimeError unless timm has every method, with our arguments: names, order, kinds and defaults.

    Those in ``optional`` may be missing.
    """
    wrong = []
    for owner, functions in methods.items():
        for name, function in functions.items():
            method = owner.__dict__.get(name)
            if method is None:
                wrong += [] if name in optional else [f"{owner.__name__}.{name} is missing"]
            elif _arguments(method) != _arguments(function):
                wrong.append(f"{owner.__name__}.{name} takes {inspect.signature(method)}")
    _refuse(wrong)


def check_reads(methods: Iterable[tuple[Any, str]]) -> None:
    """Raise RuntimeError unless timm's (class, method name) pairs read of ``self`` what they are known to.

    Only a timm newer than ``NEWEST_KNOWN_TIMM`` is looked at. The rotary modules are, if ``NaFlexVit`` is among them.
    """
    if installed_timm() <= NEWEST_KNOWN_TIMM:
        return
    methods = [(owner, name) for owner, name in methods if f"{owner.__name__}.{name}" in READS]
    wrong = [change for owner, name in methods for change in _changes(owner, name, READS)]
    for owner, name in methods:
        if name.startswith("_") and name not in reads(owner):
            wrong.append(f"{owner.__name__} does not call {name} any more")
    if any(owner.__name__ == "NaFlexVit" for owner, _ in methods):
        from timm.layers import pos_embed_sincos

        for key in ROPE_READS:
            cls, name = key.split(".")
            if hasattr(pos_embed_sincos, cls):  # another class than these is left to timm's own code
                wrong += _changes(getattr(pos_embed_sincos, cls), name, ROPE_READS)
    _refuse(wrong)


def reads(function: Any) -> frozenset[str]:
    """The attributes of ``self`` that a function, or any method of a class, reads, by ``getattr`` too.

    Raises:
        OSError: its source is not to be had.
    """
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Load()):
                found.add(name)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"), args=[ast.Name(id="self"), ast.Constant(value=str(name)), *_]
            ):
                found.add(name)
    return frozenset(found)


def _changes(owner: Any, name: str, known: dict[str, str]) -> list[str]:
    key = f"{owner.__name__}.{name}"
    if name not in owner.__dict__:
        return [f"{key} is missing"]
    try:
        now, before = reads(owner.__dict__[name]), frozenset(known[key].split())
    except OSError:
        return [f"{key} cannot be checked without its source"]
    return [
        f"{key} {verb} {', '.join(sorted(names))}"
        for verb, names in (("now reads", now - before), ("no longer reads", before - now))
        if names
    ]


@lru_cache(maxsize=128)
def _arguments(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def _refuse(wrong: list[str]) -> None:
    if wrong:
        import timm

        oldest, newest = (".".join(map(str, version)) for version in (OLDEST_TIMM, NEWEST_KNOWN_TIMM))
        raise RuntimeError(
            f"timm {timm.__version__} is not supported by this timm_naflex_fast ({oldest} to {newest} are, and newer "
            f"ones as long as what it replaces is the same): {'; '.join(wrong)}. Nothing was changed"
        )
