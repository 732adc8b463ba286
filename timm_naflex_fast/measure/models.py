"""timm NaFlexVits to measure."""

import argparse
import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from .output import printable

DTYPES = ("float32", "bfloat16", "float16")
HOW_TO_GIVE = "give a local file of weights with --checkpoint FILE, or --random-weights to measure an untrained model"
HOW_TO_FIT = "--model-kwargs takes the options with which its model was made, e.g. 'pos_embed_grid_size=(24, 24)'"
HOW_TO_MATCH = f"the file must hold the state dict of timm's model itself; {HOW_TO_FIT}"
HOW_TO_SAVE = "save a file of tensors: .safetensors, or torch.save(model.state_dict(), FILE)"
STATES = (
    "state_dict_ema",
    "model_ema",
    "state_dict",
    "model",
)  # where trainers keep the weights, in timm's order


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that name a model and describe its weights."""
    add, either = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    add(
        "--model",
        metavar="NAME",
        help="timm NaFlexVit, e.g. naflexvit_base_patch16_siglip.v2_webli",
    )
    either("--checkpoint", metavar="FILE", help="local weights: .safetensors, .pth, .pth.tar")
    either("--random-weights", action="store_true", help="the untrained model")
    more = "options of the model, as timm's scripts take them"
    add("--model-kwargs", nargs="+", default=[], type=_setting, metavar="KEY=VALUE", help=more)


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def load_model(
    name: str | None,
    checkpoint: str | Path | None = None,
    /,
    *,
    random_weights: bool = False,
    dtype: str = "float32",
    **more: Any,
) -> tuple[Any, str]:
    """Create a timm NaFlexVit in eval mode, and say in words which weights it holds.

    Args:
        name: a timm model, e.g. ``naflexvit_base_patch16_siglip.v2_webli``; timm turns a ViT into a
            NaFlexVit.
        checkpoint: a local file; see :func:`read_weights`. The model gets as many classes as its
            head has.
        random_weights: keep the initialisation (seed 0), but make a learned position table of sines
            and cosines: neighbouring cells of a trained table are alike, those of noise are not.
        dtype: torch's name of the number type to which the whole model is cast.
        more: further options of ``timm.create_model``.

    Raises:
        ValueError: no name, or one that timm does not know.
        FileNotFoundError: no such checkpoint.
        RuntimeError: timm makes no NaFlexVit of the name with these options, or the weights cannot
            be loaded, or a parameter (but those of a head that ``num_classes`` replaces) is not in
            them, or the model does not use one of their tensors; says how to give them.
    """
    import timm
    import torch
    from timm.layers import build_sincos2d_pos_embed
    from timm.models.naflexvit import NaFlexVit

    if not name:
        raise ValueError(
            "a model is needed: --model NAME, e.g. --model naflexvit_base_patch16_siglip.v2_webli"
        )
    if checkpoint is not None and not Path(checkpoint).is_file():
        raise FileNotFoundError(f"no checkpoint at {checkpoint}; {HOW_TO_GIVE}")
    family = name.split(".")[0]
    if not family.startswith(("naflexvit", "vit_")) or not timm.is_model(family):
        valid = ", ".join([*timm.list_models("naflexvit*"), "vit_small_patch16_224 and other ViTs"])
        raise ValueError(f"timm has no NaFlexVit {name!r}; valid: {valid}")
    if family.startswith("vit_"):
        more["use_naflex"] = True
    weights, what, advice = f"pretrained, {name}", f"the model {name!r}", HOW_TO_GIVE
    if random_weights:
        weights, advice = (
            "random, untrained, seed 0; position table of sines and cosines",
            HOW_TO_FIT,
        )
    elif checkpoint is not None:
        what, advice = f"the checkpoint {checkpoint}", HOW_TO_MATCH
        with load_errors(what, HOW_TO_SAVE):
            state, key = read_weights(checkpoint)
            classes = len(state.get("head.weight", ()))
        weights = f"file {printable(Path(checkpoint).name)}" + f" ({key})" * bool(key)
        # As an overlay, timm converts keys and shapes as it does for weights from the hub.
        overlay = more["pretrained_cfg_overlay"] = dict[str, Any](state_dict=state)
        if (
            "head.weight" in state or "blocks.0.norm1.weight" in state
        ):  # timm's own names: a head would have this one
            overlay["num_classes"] = classes
            more = {"num_classes": classes, **more}
    heads: list[str] = []
    load = NaFlexVit.load_state_dict

    def load_whole(model: Any, state: dict[str, Any], *_: Any, **__: Any) -> Any:
        heads.append(_check_whole(model, state))
        return load(model, state, strict=False)

    with (
        torch.random.fork_rng(devices=[]),
        load_errors(what, advice),
        patch.object(NaFlexVit, "load_state_dict", load_whole),
    ):
        torch.manual_seed(0)
        model = timm.create_model(name, pretrained=not random_weights, **more)
    model.pretrained_cfg.pop("state_dict", None)
    if random_weights and (table := model.embeds.pos_embed) is not None:
        smooth = build_sincos2d_pos_embed(list(table.shape[1:3]), dim=table.shape[3])
        table.data.copy_(smooth.view(table.shape))
    return model.eval().to(getattr(torch, dtype)), weights + "".join(heads)


def _check_whole(model: Any, given: dict[str, Any]) -> str:
    """Refuse a state dict that is not whole, or not the model's; words for a head that it replaces.

    timm calls this with what it has converted: with the model's own names and shapes.
    """
    parameters, buffers = (
        [name for name, _ in named] for named in (model.named_parameters(), model.named_buffers())
    )
    replaced = model.num_classes != model.pretrained_cfg["num_classes"]
    head = f"{model.pretrained_cfg['classifier']}." if replaced else "no head"
    missing = [name for name in parameters if name not in given and not name.startswith(head)]
    unused = [name for name in given if name not in {*parameters, *buffers}]
    kinds = {
        f"of the model's {len(parameters)} parameters not in it": missing,
        "tensors that it does not use": unused,
    }
    if wrong := [
        f"{len(names)} {kind} ({', '.join(names[:3])})" for kind, names in kinds.items() if names
    ]:
        raise ValueError("; ".join(wrong))
    return (
        f"; an untrained head of {model.num_classes} classes"
        if replaced and model.num_classes
        else ""
    )


def read_weights(file: str | Path) -> tuple[dict[str, Any], str]:
    """The weights in a local file, and under which key its trainer kept them ("" if it holds
    nothing else).

    Only tensors are read, whatever timm's release would do: a pickle can run any code.

    Raises:
        ValueError: the file holds something else.
    """
    import numpy as np
    import torch
    from safetensors.torch import load_file
    from timm.models import clean_state_dict

    if str(file).endswith(".safetensors"):
        return clean_state_dict(load_file(file)), ""
    # Beside the weights timm's train.py keeps its options, and others their figures as NumPy's
    # numbers.
    numbers = [type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["Float"]]
    torch.serialization.add_safe_globals(
        [argparse.Namespace, np.dtype, np.float64().__reduce__()[0], *numbers]
    )
    found = torch.load(file, map_location="cpu", weights_only=True)
    key = next((key for key in STATES if found.get(key) is not None), "")
    state = clean_state_dict(found[key] if key else found)
    if not state or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise ValueError("it holds no state dict")
    return state, key


@contextmanager
def load_errors(what: str, advice: str = HOW_TO_GIVE) -> Iterator[None]:
    """Turn whatever reading weights raises into a RuntimeError of one line: ``what`` failed, and
    what to do."""
    try:
        yield
    except (
        Exception
    ) as error:  # no network, a cut-off file, a pickle of something else, tensors of another model
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        raise RuntimeError(f"{what} cannot be loaded ({reason}); {advice}") from error
