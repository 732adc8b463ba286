"""timm NaFlexVits to measure."""

import argparse
import ast
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from unittest.mock import patch

from .checkpoints import read_checkpoint, sizes

DTYPES = ("float32", "bfloat16", "float16")
HOW_TO_GIVE = (
    "give a local file of weights with --checkpoint FILE, or --random-weights to measure an "
    "untrained model"
)
HOW_TO_FIT = (
    "--model-kwargs takes the options with which its model was made, e.g. "
    "'pos_embed_grid_size=(24, 24)'"
)
HOW_TO_MATCH = (
    "the file must hold the state dict of timm's model itself, or SigLIP-2 as transformers or "
    f"open_clip saves it; {HOW_TO_FIT}"
)
HOW_TO_CONVERT = f"timm's own conversion of these weights failed; {HOW_TO_FIT}"
HOW_TO_SAVE = "save a file of tensors: .safetensors, or torch.save(model.state_dict(), FILE)"
# timm's modules with models called vit_... of which timm makes no NaFlexVit.
OTHER_VITS = ("vision_transformer_hybrid", "vision_transformer_relpos")


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
        help="local weights of timm, or SigLIP-2's of transformers or open_clip: a file "
        "(.safetensors, .pth, .bin), an index of shards, or a folder",
    )
    weights.add_argument("--random-weights", action="store_true", help="the untrained model")
    parser.add_argument(
        "--model-kwargs",
        nargs="+",
        default=[],
        type=_setting,
        metavar="KEY=VALUE",
        help="options of the model, as timm's scripts take them",
    )


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def check_model(name: str) -> None:
    """Find out whether timm knows a NaFlexVit of this name; looks for no weights.

    Raises:
        ValueError: timm does not know it.
    """
    import timm
    from timm.models import get_pretrained_cfg, is_model_in_modules

    family = name.split(".")[0]
    is_vit = family.startswith(("naflexvit", "vit_")) and timm.is_model(family)
    if not is_vit or is_model_in_modules(family, OTHER_VITS):
        raise ValueError(f"timm has no NaFlexVit {name!r}{_valid_names(family)}")
    try:
        get_pretrained_cfg(name)
    except RuntimeError as error:
        valid = ", ".join(timm.list_pretrained(f"{family}.*"))
        raise ValueError(f"timm has no weights {name!r}; valid: {valid or family}") from error


def _valid_names(wrong: str) -> str:
    """Which name may be meant, and which there are, as the end of a sentence."""
    import timm

    own = timm.list_models("naflexvit*")
    valid = f"; valid: {', '.join(own)}, vit_small_patch16_224 and other ViTs"
    close = get_close_matches(
        wrong, own + timm.list_models("vit_*", module="vision_transformer"), n=1
    )
    if not close:
        return valid
    return f"; did you mean {close[0]}?{valid}"


def load_model(
    name: str,
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
        checkpoint: a local file or folder; see :func:`read_checkpoint`. The model gets as many
            classes as its head has, and the size of a tower that another library wrote.
        random_weights: keep the initialisation (seed 0), but make a learned position table of sines
            and cosines: neighbouring cells of a trained table are alike, those of noise are not.
        dtype: torch's name of the number type to which the whole model is cast.
        more: further options of ``timm.create_model``.

    Raises:
        ValueError: timm does not know the name.
        FileNotFoundError: no such checkpoint.
        RuntimeError: timm makes no NaFlexVit of the name with these options, or the weights cannot
            be loaded, or a parameter (but those of a head that ``num_classes`` replaces) is not in
            them, or the model does not use one of their tensors; says how to give them.
    """
    if checkpoint is not None and not Path(checkpoint).exists():
        raise FileNotFoundError(f"no checkpoint at {checkpoint}; {HOW_TO_GIVE}")
    check_model(name)
    import torch

    options = dict(more)
    if name.startswith("vit_"):
        options["use_naflex"] = True
    if random_weights:
        model, weights = _untrained(name, options)
    elif checkpoint is not None:
        model, weights = _from_file(name, Path(checkpoint), options)
    else:
        with load_errors(f"the model {name!r}", HOW_TO_GIVE):
            model, head = _create_whole(name, options)
        weights = f"pretrained, {name}{head}"
    return model.eval().to(getattr(torch, dtype)), weights


def _untrained(name: str, options: dict[str, Any]) -> tuple[Any, str]:
    """The model with timm's initialisation, but a smooth position table."""
    import timm
    import torch
    from timm.layers import build_sincos2d_pos_embed

    with load_errors(f"the model {name!r}", HOW_TO_FIT), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = timm.create_model(name, pretrained=False, **options)
    table = model.embeds.pos_embed
    if table is not None:
        smooth = build_sincos2d_pos_embed(list(table.shape[1:3]), dim=table.shape[3])
        table.data.copy_(smooth.view(table.shape))
    return model, "random, untrained, seed 0; position table of sines and cosines"


def _from_file(name: str, file: Path, options: dict[str, Any]) -> tuple[Any, str]:
    """The model with the weights of a local file."""
    with load_errors(f"the checkpoint {file}", HOW_TO_SAVE):
        checkpoint = read_checkpoint(file)
        state = checkpoint.tensors
        classes = len(state.get("head.weight", ()))
    # As an overlay, timm converts keys and shapes as it does for weights from the hub.
    overlay: dict[str, Any] = {"state_dict": state}
    if "head.weight" in state or "blocks.0.norm1.weight" in state:
        # These are timm's own names: a head would have the first one.
        overlay["num_classes"] = classes
        options = {"num_classes": classes, **options}
    if checkpoint.library != "timm":
        with load_errors(f"the checkpoint {file}", HOW_TO_FIT):
            options = {**sizes(checkpoint, options.get("num_heads")), **options}
    with load_errors(f"the checkpoint {file}", HOW_TO_CONVERT):
        model, head = _create_whole(name, {**options, "pretrained_cfg_overlay": overlay})
    model.pretrained_cfg.pop("state_dict", None)
    return model, checkpoint.words + head


def _create_whole(name: str, options: dict[str, Any]) -> tuple[Any, str]:
    """A model with pretrained weights that are whole, and words for a head that it replaces."""
    import timm
    import torch
    from timm.models.naflexvit import NaFlexVit

    heads: list[str] = []
    load = NaFlexVit.load_state_dict

    def load_whole(model: Any, state: dict[str, Any], *_: Any, **__: Any) -> Any:
        heads.append(_check_whole(model, state))
        return load(model, state, strict=False)

    with (
        torch.random.fork_rng(devices=[]),
        patch.object(NaFlexVit, "load_state_dict", load_whole),
    ):
        torch.manual_seed(0)  # for a head that is not in the weights
        model = timm.create_model(name, pretrained=True, **options)
    return model, "".join(heads)


def _check_whole(model: Any, given: dict[str, Any]) -> str:
    """Refuse a state dict that is not whole, or not the model's; words for a head that it replaces.

    timm calls this with what it has converted: with the model's own names and shapes.
    """
    parameters = dict(model.named_parameters())
    is_new_head = model.num_classes != model.pretrained_cfg["num_classes"]
    needed = set(parameters)
    if is_new_head:
        head = f"{model.pretrained_cfg['classifier']}."
        needed = {name for name in parameters if not name.startswith(head)}
    missing = needed - given.keys()
    unused = given.keys() - parameters.keys() - dict(model.named_buffers()).keys()

    wrong = []
    if missing:
        count = f"{len(missing)} of the model's {len(parameters)} parameters not in it"
        wrong.append(f"{count} ({_first(missing)})")
    if unused:
        wrong.append(f"{len(unused)} tensors that it does not use ({_first(unused)})")
    if wrong:
        raise NamesDiffer("; ".join(wrong))
    if is_new_head and model.num_classes:
        return f"; an untrained head of {model.num_classes} classes"
    return ""


def _first(names: set[str]) -> str:
    """The first three of these names."""
    return ", ".join(sorted(names)[:3])


class NamesDiffer(ValueError):
    """A checkpoint lacks parameters of the model, or has tensors that the model does not use."""

    advice = HOW_TO_MATCH


@contextmanager
def load_errors(what: str, advice: str = HOW_TO_GIVE) -> Iterator[None]:
    """Turn whatever reading weights raises into a RuntimeError of one line.

    It says that ``what`` failed, why, and what to do.
    """
    try:
        yield
    # No network, a cut-off file, a pickle of something else, tensors of another model.
    except Exception as error:
        text = " ".join(str(error).split())
        if text.startswith("Weights only load failed"):  # torch goes on with unsafe advice
            text = "Weights only load failed"
        reason = f"{type(error).__name__}: {text}"[:300]
        if isinstance(error, NamesDiffer):
            advice = error.advice
        raise RuntimeError(f"{what} cannot be loaded ({reason}); {advice}") from error
