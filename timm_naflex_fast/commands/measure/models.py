"""timm NaFlexVits to measure."""

import argparse
import ast
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...names import did_you_mean
from .checkpoints import read_checkpoint
from .output import one_line, printable
from .weight_files import find_weights

TAKEN = (
    "--checkpoint FILE takes timm's own weights, and SigLIP-2's NaFlex image tower as transformers, "
    "open_clip or Google (with timm 1.0.31) saves it: a file (.safetensors, .pth, .bin, .npz), an "
    "index of shards (.index.json), a folder with one of these, or OWNER/NAME of a model in the "
    "hub's cache; --model-kwargs takes the model's options, e.g. 'pos_embed_grid_size=(24, 24)'; "
    "--random-weights takes an untrained model"
)
RESIZED = (
    "give the model the table's size, as --model-kwargs 'pos_embed_grid_size=(24, 24)', or the table "
    "the model's, by timm_naflex_fast.functional.resample_pos_embed"
)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that name a model and describe its weights."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="timm NaFlexVit, e.g. naflexvit_base_patch16_siglip.v2_webli",
    )
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument(
        "--checkpoint",
        metavar="FILE",
        help="local weights of timm, or SigLIP-2's of transformers, open_clip or Google: a file "
        "(.safetensors, .pth, .bin, .npz), an index of shards, a folder, or the name of a model in "
        "the hub's cache",
    )
    weights.add_argument("--random-weights", action="store_true", help="the untrained model")
    parser.add_argument(
        "--model-kwargs",
        nargs="+",
        default=[],
        type=setting,
        metavar="KEY=VALUE",
        help="options of the model, as timm's scripts take them",
    )


def setting(text: str) -> tuple[str, Any]:
    """An option of a model; text without "=" is a ValueError, which argparse reports."""
    key, value = text.split("=", 1)
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def check_model(name: str) -> None:
    """Find out whether timm knows a NaFlexVit of this name; looks for no weights.

    Raises:
        ValueError: timm does not know it.
    """
    # To ask timm itself takes seconds: it imports torch. Each of its models is a function.
    timm: Any = find_spec("timm")
    names: list[str] = []
    for file in Path(timm.origin).parent.glob("models/*.py"):
        names += re.findall(r"^def ((?:naflexvit|vit)_\w+)\(", file.read_text("utf-8"), re.M)
    family = name.split(".")[0]
    if family not in names:
        raise ValueError(
            f"timm has no NaFlexVit {name!r}; valid: naflexvit_* and vit_* of timm.list_models(); "
            "OWNER/NAME of a hub is for --checkpoint"
            f"{did_you_mean(family, names)}"
        )


def load_model(
    name: str,
    checkpoint: str | Path | None = None,
    /,
    *,
    random_weights: bool = False,
    **more: Any,
) -> tuple[Any, str]:
    """Create a timm NaFlexVit in eval mode, and say in words which weights it holds.

    Args:
        name: a timm model, e.g. ``naflexvit_base_patch16_siglip.v2_webli``; timm turns a ViT into a
            NaFlexVit.
        checkpoint: a local file or folder; see :func:`read_checkpoint`. The model gets as many
            classes as its head has.
        random_weights: keep the initialisation (seed 0), but make a learned position table of sines
            and cosines: neighbouring cells of a trained table are alike, those of noise are not.
        more: further options of ``timm.create_model``.

    Raises:
        ValueError: timm does not know the name.
        RuntimeError: timm makes no NaFlexVit of the name with these options, or the weights cannot
            be loaded, or a parameter is not in them, or the model does not use one of their tensors (of Google's file: those that timm
            looks for); says how to give them.
    """
    check_model(name)
    import timm
    import torch
    from huggingface_hub import snapshot_download

    if name.startswith("vit_"):
        more["use_naflex"] = True
    what = f"the model {name!r}"
    if checkpoint is not None:
        what = f"the checkpoint {checkpoint}"
    with load_errors(what):
        torch.manual_seed(0)
        if checkpoint is not None:
            file = find_weights(checkpoint)
            model = _with_file(name, file, more)
            weights = f"file {printable(file.name)}"
        elif random_weights:
            model = timm.create_model(name, **more)
            _smooth(model.embeds.pos_embed)
            weights = "random, untrained, seed 0; position table of sines and cosines"
        else:
            # Asks the hub once, or takes what is in its cache; timm would go on asking for a minute.
            repository = timm.get_pretrained_cfg(name).hf_hub_id
            snapshot_download(repository, allow_patterns="config.json")
            model = timm.create_model(name, pretrained=True, **more)
            weights = f"pretrained, {name}"
    return model.eval(), weights


def _with_file(name: str, file: Path, given: dict[str, Any]) -> Any:
    """A NaFlexVit with the weights of a file, which timm converts as it does those of the hub."""
    import timm
    from timm.models.naflexvit import checkpoint_filter_fn

    if file.suffix == ".npz":  # Google's, which timm itself reads
        model = timm.create_model(name, **{"num_classes": 0, **given})
        model.load_pretrained(str(file))
        return model
    tensors = read_checkpoint(file)
    classes = len(tensors.get("head.weight", ()))
    model = timm.create_model(name, **{"num_classes": classes, **given})
    model.load_state_dict(checkpoint_filter_fn(tensors, model))
    return model


def _smooth(table: Any) -> None:
    """Make a learned position table, (1, H, W, C), one of sines and cosines."""
    from timm.layers import build_sincos2d_pos_embed

    # A model with other tables, or none, has nothing to smooth.
    if table is not None:
        smooth = build_sincos2d_pos_embed(list(table.shape[1:3]), dim=table.shape[3])
        table.data.copy_(smooth.view(table.shape))


@contextmanager
def load_errors(what: str, advice: str = TAKEN) -> Iterator[None]:
    """Turn whatever loading a model raises into a RuntimeError of one line.

    It says that ``what`` failed, why, and what to do.
    """
    try:
        yield
    # No file, no network, tensors of another size, options that timm does not know.
    except Exception as error:
        text = one_line(error)
        if "weights_only" in text:  # torch and timm go on with unsafe advice
            text = "it holds other things than tensors, or is damaged"
        if "size mismatch for embeds.pos_embed" in text:
            advice = RESIZED
        raise RuntimeError(f"{what} cannot be loaded ({text}); {advice}") from error


def fingerprint(model: Any) -> str:
    """SHA-256 of the weights, names and all: the same however they were loaded."""
    from safetensors.torch import save

    return hashlib.sha256(save(model.state_dict())).hexdigest()
