"""What can stand in for timm's resampling while drift is measured: our strategies, and others' ways of doing it.

| name | what it is |
| --- | --- |
| bilinear, bicubic, ...-no-antialias | timm's own loop at another setting of the model |
| timm-flag-bilinear, timm-flag-bicubic | timm's own ``pos_embed_use_grid_sample=True`` |
| issue-2514-zeros, issue-2514-border | timm issue 2514: ``affine_grid`` and ``grid_sample``, and its padding |
| hf-siglip2 | HF transformers' Siglip2 embedding (bilinear, antialias), given the same table |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...functional import add_pos_embed_
from ...patching.install import enable
from ...patching.modes import POS_EMBED
from ..bench import peers as bench_peers

METHODS = ("_apply_learned_naflex_pos_embed", "_apply_learned_naflex_pos_embed_grid_sample")
WORDS = {
    "stock": "timm's own loop",
    "interpolate_cached": "this package: F.interpolate, kept across calls",
    "grid_sample": "this package: one grid_sample per batch",
    "matmul": "this package: products with resize matrices",
    "bilinear": "timm's loop, bilinear, antialias",
    "bicubic": "timm's loop, bicubic, antialias",
    "bilinear-no-antialias": "timm's loop, bilinear, no antialias",
    "bicubic-no-antialias": "timm's loop, bicubic, no antialias",
    "timm-flag-bilinear": "timm's grid_sample flag, bilinear",
    "timm-flag-bicubic": "timm's grid_sample flag, bicubic",
    "issue-2514-zeros": "timm issue 2514's grid_sample, zeros outside",
    "issue-2514-border": "timm issue 2514's grid_sample, border outside",
    "hf-siglip2": "HF transformers' Siglip2 embedding",
}
NAMES = tuple(WORDS)
PEERS = tuple(name for name in NAMES if name not in POS_EMBED)


def settings(embeds: Any) -> str:
    """How a NaFlexEmbeds resamples by itself, in words, e.g. "bicubic, antialias"."""
    if embeds.pos_embed_type != "learned":
        return "linear" if embeds.pos_embed_type == "factorized" else "no position table"
    words = [embeds.pos_embed_interp_mode]
    if embeds.pos_embed_use_grid_sample:
        words.append("grid_sample")
    else:
        words.append("antialias" if getattr(embeds, "pos_embed_antialias", True) else "no antialias")
    words += ["align_corners"] * bool(getattr(embeds, "pos_embed_align_corners", False))
    return ", ".join(words + ["aspect preserving"] * bool(embeds.pos_embed_ar_preserving))


def left_out(name: str, embeds: Any) -> str | None:
    """Why ``name`` cannot be measured on this NaFlexEmbeds, or would only repeat its own setting; None if it can.

    Raises:
        ValueError: no such name.
    """
    if name not in NAMES:
        raise ValueError(f"{name!r} cannot be measured; valid: {', '.join(NAMES)}")
    if name in POS_EMBED:
        return None
    if embeds.pos_embed_type != "learned":
        return f"it resamples a learned 2-D table; this model's is {embeds.pos_embed_type!r}"
    values = _values(name)
    if "pos_embed_antialias" in values and not hasattr(embeds, "pos_embed_antialias"):
        if not values.pop("pos_embed_antialias"):
            return "this timm has no such setting"
    if values and all(getattr(embeds, key) == value for key, value in values.items()):
        return "it is the model's own setting, and so stock"
    return bench_peers.missing(name)


@contextmanager
def standing_in(name: str, model: nn.Module) -> Iterator[None]:
    """While inside, ``model`` resamples its position table as ``name`` says; afterwards it is as it was.

    Patch kernels and rotary tables stay timm's own throughout, so that nothing else moves.

    Raises:
        ValueError: no such name, or it cannot be measured on this model.
    """
    embeds: Any = model.embeds
    why = left_out(name, embeds)
    if why is not None:
        raise ValueError(f"{name!r} cannot be measured: {why}")
    own = POS_EMBED[0] if name in PEERS else name
    attributes = _values(name) or {}
    if name in PEERS and not attributes:
        attributes = dict.fromkeys(METHODS, _adder(name, embeds))  # hides the methods of this one instance's class
    before = dict(embeds.__dict__)
    with enable(mode="stock", pos_embed=own, model=model):
        try:
            embeds.__dict__.update({k: v for k, v in attributes.items() if k in METHODS or hasattr(embeds, k)})
            yield
        finally:
            for key in attributes:
                embeds.__dict__.pop(key, None)
                if key in before:
                    embeds.__dict__[key] = before[key]


def _values(name: str) -> dict[str, Any]:
    """timm's settings that make up a peer; none where it is other code."""
    if name.startswith("timm-flag-"):
        return dict(pos_embed_use_grid_sample=True, pos_embed_interp_mode=name.removeprefix("timm-flag-"))
    mode, _, rest = name.partition("-")
    if mode not in ("bilinear", "bicubic"):
        return {}
    return dict(pos_embed_use_grid_sample=False, pos_embed_interp_mode=mode, pos_embed_antialias=not rest)


def _adder(name: str, embeds: Any) -> Callable[[Tensor, Tensor], None]:
    """A stand-in for timm's method: adds into ``x`` (B, N, C) in place at ``patch_coord`` (B, N, 2)."""

    def issue_2514(x: Tensor, patch_coord: Tensor) -> None:
        add_pos_embed_(
            x,
            embeds.pos_embed,
            patch_coord,
            strategy="grid_sample",
            mode=embeds.pos_embed_interp_mode,
            padding_mode=name.removeprefix("issue-2514-"),
            dense_positions=True,
        )

    def hf_siglip2(x: Tensor, patch_coord: Tensor) -> None:
        x.copy_(bench_peers.adder(name, embeds, patch_coord)(x))

    return hf_siglip2 if name == "hf-siglip2" else issue_2514
