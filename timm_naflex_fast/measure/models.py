"""timm NaFlexVits to measure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

DTYPES = ("float32", "bfloat16", "float16")
RANDOM = "stand-in: random, untrained, seed 0; position table of sines and cosines"


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
        dtype: one of ``DTYPES``, to which the whole model is cast.
        more: further options of ``timm.create_model``.

    Raises:
        ValueError: timm does not know the name, or the model is no NaFlexVit; an unknown dtype; a checkpoint that
            cannot be read, or is of another model.
        FileNotFoundError: no such checkpoint.
        RuntimeError: the pretrained weights could not be loaded; says how to give them.
    """
    import timm

    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} cannot be measured; valid: {', '.join(DTYPES)}")
    if checkpoint is not None and not Path(checkpoint).is_file():
        raise FileNotFoundError(
            f"no checkpoint at {checkpoint}; give a file of weights for {name!r} (.safetensors or .pth)"
        )
    family = name.split(".")[0]
    if not family.startswith(("naflexvit", "vit_")) or not timm.is_model(family):
        valid = ", ".join([*timm.list_models("naflexvit*"), "vit_small_patch16_224 and other ViTs"])
        raise ValueError(f"timm has no NaFlexVit {name!r}; valid: {valid}")
    more["pretrained"] = not random_weights
    if family.startswith("vit_"):
        more["use_naflex"] = True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if random_weights:
            weights, model = RANDOM, timm.create_model(name, **more)
            _smooth_table(model.embeds)
        elif checkpoint is not None:
            weights = f"file {Path(checkpoint).name}"
            with reading(checkpoint):
                # As an overlay, timm converts keys and shapes as it does for weights from the hub.
                model = timm.create_model(name, pretrained_cfg_overlay=dict(file=str(checkpoint)), **more)
        else:
            weights = f"pretrained, {name}"
            try:
                model = timm.create_model(name, **more)
            except Exception as error:  # whatever the hub's client raises
                raise RuntimeError(
                    f"the pretrained weights of {name!r} could not be loaded ({_one_line(error)}); "
                    "give a local file with --checkpoint FILE, or --random-weights to measure an untrained model"
                ) from error
    return model.eval().to(getattr(torch, dtype)), weights


@contextmanager
def reading(checkpoint: str | Path) -> Iterator[None]:
    """Turn whatever reading a file of weights raises into a ValueError of one line that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # a cut-off safetensors file, a pickle of something else, tensors of another model
        raise ValueError(f"the checkpoint {checkpoint} cannot be loaded ({_one_line(error)})") from error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _smooth_table(embeds: Any) -> None:
    from timm.layers import build_sincos2d_pos_embed

    table = embeds.pos_embed
    if table is not None:
        with torch.no_grad():
            table.copy_(build_sincos2d_pos_embed(list(table.shape[1:3]), dim=table.shape[3]).view(table.shape))
