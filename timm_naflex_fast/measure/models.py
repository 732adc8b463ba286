"""timm NaFlexVits to measure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

HOW_TO_GIVE = "give a local file of weights with --checkpoint FILE, or --random-weights to measure an untrained model"


def load_model(
    name: str,
    checkpoint: str | Path | None = None,
    *,
    random_weights: bool = False,
    dtype: str = "float32",
    **more: Any,
) -> tuple[Any, str]:
    """Create a timm NaFlexVit in eval mode, and say in words which weights it holds.

    Args:
        name: a timm model, e.g. ``naflexvit_base_patch16_siglip.v2_webli``; timm turns a ViT into a NaFlexVit.
        checkpoint: a local file that timm can load; without it the pretrained weights come from the hub.
        random_weights: keep the initialisation (seed 0), but make a learned position table of sines and cosines:
            neighbouring cells of a trained table are alike, those of noise are not.
        dtype: torch's name of the number type to which the whole model is cast.
        more: further options of ``timm.create_model``.

    Raises:
        ValueError: timm does not know the name, or the model is no NaFlexVit.
        FileNotFoundError: no such checkpoint.
        RuntimeError: the weights cannot be loaded, or are of another model; says how to give them.
    """
    import timm
    from timm.layers import build_sincos2d_pos_embed

    if checkpoint is not None and not Path(checkpoint).is_file():
        raise FileNotFoundError(f"no checkpoint at {checkpoint}; {HOW_TO_GIVE}")
    family = name.split(".")[0]
    if not family.startswith(("naflexvit", "vit_")) or not timm.is_model(family):
        valid = ", ".join([*timm.list_models("naflexvit*"), "vit_small_patch16_224 and other ViTs"])
        raise ValueError(f"timm has no NaFlexVit {name!r}; valid: {valid}")
    if family.startswith("vit_"):
        more["use_naflex"] = True
    weights, what = f"pretrained, {name}", f"the model {name!r}"
    if random_weights:
        weights = "stand-in: random, untrained, seed 0; position table of sines and cosines"
    elif checkpoint is not None:
        weights, what = f"file {Path(checkpoint).name}", f"the checkpoint {checkpoint}"
        # As an overlay, timm converts keys and shapes as it does for weights from the hub.
        more["pretrained_cfg_overlay"] = dict(file=str(checkpoint))
    with torch.random.fork_rng(devices=[]), reading(what):
        torch.manual_seed(0)
        model = timm.create_model(name, pretrained=not random_weights, **more)
    if random_weights and (table := model.embeds.pos_embed) is not None:
        smooth = build_sincos2d_pos_embed(list(table.shape[1:3]), dim=table.shape[3])
        table.data.copy_(smooth.view(table.shape))
    return model.eval().to(getattr(torch, dtype)), weights


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turn whatever reading weights raises into a RuntimeError of one line: ``what`` failed, and what to do."""
    try:
        yield
    except Exception as error:  # no network, a cut-off file, a pickle of something else, tensors of another model
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        raise RuntimeError(f"{what} cannot be loaded ({reason}); {HOW_TO_GIVE}") from error
