"""From pictures to what each stage of an image tower gives: timm's pipeline and transformers'.

Tests: tests/commands/recordings/test_agreement.py.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...patching.install import enable
from ..recordings.format import Stages
from .bench.workloads import coordinates
from .checkpoints import read_config
from .contenders import BASELINE, use
from .images import eval_transform
from .models import load_errors
from .tower_names import PATCHES, channels_first, channels_last, to_transformers

LIBRARY = "transformers"
PROCESSOR = "preprocessor_config.json"
HOW_TO_BUILD = "pip install -U transformers; config.json must be that of the weights"

Pictures = Sequence[Any]  # PIL images in RGB


class Inputs(NamedTuple):
    """Pictures as an image tower takes them."""

    grid: Tensor  # (B, 2) rows and columns of patches
    pixels: Tensor  # (B, N, y * x * channel), row by row, then padding
    valid: Tensor  # (B, N) bool, False for padding


class Pipeline(NamedTuple):
    """From pictures to what a tower takes, and from that to all stages of each picture."""

    read: Callable[[Pictures], Inputs]
    tower: Callable[[Inputs], list[Stages]]


@dataclass(frozen=True)
class Source:
    """What is recorded.

    Attributes:
        words: which pipeline it is.
        build: from a number type to the pipeline that computes in it.
        model: the timm NaFlexVit that holds the weights.
        max_patches: most patches of a picture.
        filter: of the resize of pictures.
        mean: what is taken off each colour, from 0 to 1.
        std: what each colour is then divided by.
        notes: in words, which settings of the library other values are taken for.
    """

    words: str
    build: Callable[[torch.dtype], Pipeline]
    model: Any
    max_patches: int
    filter: str
    mean: Sequence[float]
    std: Sequence[float]
    notes: Sequence[str] = ()


def timm_source(
    model: Any, max_patches: int, interpolation: str | None = None, contender: str = BASELINE
) -> Source:
    """timm's pipeline; the arguments are those of :func:`timm_pipeline`."""
    from timm.data import resolve_data_config

    def build(dtype: torch.dtype) -> Pipeline:
        one = copy.deepcopy(model).to(dtype)
        return timm_pipeline(one, max_patches, interpolation, contender)

    config = resolve_data_config({"interpolation": interpolation}, model=model)
    return Source(
        words=f"timm, {contender}",
        build=build,
        model=model,
        max_patches=max_patches,
        filter=config["interpolation"],
        mean=config["mean"],
        std=config["std"],
    )


def transformers_source(
    model: Any, max_patches: int | None = None, folder: str | Path | None = None
) -> Source:
    """transformers' pipeline with the weights of timm's ``model``.

    Args:
        model: a NaFlexVit of SigLIP-2's design.
        max_patches: most patches of a picture; without it, that of the processor.
        folder: where transformers' settings of the tower and of the processor may lie.

    Raises:
        RuntimeError, ValueError: as :func:`build_tower` and :func:`build_processor`.
    """
    from PIL.Image import Resampling

    processor, notes = build_processor(model, max_patches, folder)
    config: Mapping[str, Any] = {}
    if folder:
        config = read_config(Path(folder))
        if not config:
            notes.append("no config.json tells the number of attention heads: timm's is taken")
    tower = build_tower(model, config)

    def build(dtype: torch.dtype) -> Pipeline:
        return transformers_pipeline(copy.deepcopy(tower).to(dtype), processor)

    # Its pixels are (byte * rescale - mean) / std, ours (byte / 255 - mean) / std.
    rescale = processor.rescale_factor if processor.do_rescale else 1.0
    mean = np.zeros(3)
    std = np.ones(3)
    if processor.do_normalize:
        mean = np.array(processor.image_mean)
        std = np.array(processor.image_std)
    largest = 255 * rescale
    return Source(
        words=f"{LIBRARY} {version(LIBRARY)}",
        build=build,
        model=model,
        max_patches=processor.max_num_patches,
        filter=Resampling(processor.resample).name.lower(),
        mean=list(mean / largest),
        std=list(std / largest),
        notes=notes,
    )


def timm_pipeline(
    model: Any,
    max_seq_len: int,
    interpolation: str | None = None,
    contender: str = BASELINE,
) -> Pipeline:
    """timm's own transforms and collation, and a NaFlexVit whose table a contender resamples.

    Args:
        model: a NaFlexVit in eval mode.
        max_seq_len: most patches of a picture.
        interpolation: filter of the resize, in place of the data configuration's.
        contender: one of ``CONTENDERS``.
    """
    from timm.data.naflex_dataset import NaFlexCollator

    prepare = eval_transform(model, max_seq_len, interpolation)
    collate = NaFlexCollator(max_seq_len)
    is_channels_last = getattr(model.embeds, "channels_last", True)

    def read(pictures: Pictures) -> Inputs:
        samples = [(prepare(picture), 0) for picture in pictures]  # it wants a label
        batch, _ = collate(samples)
        grid = batch["patch_coord"].amax(1) + 1
        pixels = batch["patches"]
        if not is_channels_last:
            pixels = channels_last(pixels)
        return Inputs(grid, pixels, batch["patch_valid"])

    modules = _modules(
        model.embeds.proj,
        model.embeds,
        model.blocks,
        model.norm,
        model.attn_pool,
    )

    def tower(inputs: Inputs) -> list[Stages]:
        coord = coordinates(inputs.grid.tolist(), inputs.pixels.shape[1])
        pixels = inputs.pixels.to(model.embeds.proj.weight.dtype)
        if not is_channels_last:
            pixels = channels_first(pixels)
        batch = {"patches": pixels, "patch_coord": coord, "patch_valid": inputs.valid}
        with use(contender, model):
            return stages_of(inputs, modules, partial(model, batch))

    return Pipeline(read, tower)


def _modules(
    projection: nn.Module, embeddings: nn.Module, blocks: Any, norm: nn.Module, head: Any
) -> dict[str, nn.Module]:
    """The modules of a tower by the stages that end with them, in the order in which data flows."""
    modules = {"patch_embedding": projection, "position_embedding": embeddings}
    for number, block in enumerate(blocks):
        modules[f"block_{number}"] = block
    modules["norm"] = norm
    if head is not None:
        modules["pooled"] = head
    return modules


def transformers_pipeline(model: Any, processor: Any) -> Pipeline:
    """transformers' own image processor and Siglip2 image tower, in eval mode."""
    core = getattr(model, "vision_model", model)  # older releases wrap the tower once more
    embeddings = core.embeddings
    head = core.head if getattr(core, "use_head", True) else None
    modules = _modules(
        embeddings.patch_embedding,
        embeddings,
        core.encoder.layers,
        core.post_layernorm,
        head,
    )

    def read(pictures: Pictures) -> Inputs:
        batch = processor(images=list(pictures), return_tensors="pt")
        valid = batch["pixel_attention_mask"].bool()
        return Inputs(batch["spatial_shapes"], batch["pixel_values"], valid)

    def tower(inputs: Inputs) -> list[Stages]:
        batch = {
            "pixel_values": inputs.pixels.to(embeddings.patch_embedding.weight.dtype),
            "pixel_attention_mask": inputs.valid.long(),
            "spatial_shapes": inputs.grid,
        }
        with enable("stock", library=LIBRARY):
            return stages_of(inputs, modules, partial(model, **batch))

    return Pipeline(read, tower)


@contextmanager
def recorded(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """What each of these modules gives inside, under its stage's name."""
    found: dict[str, Tensor] = {}

    def keep(stage: str, _: Any, __: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        found[stage] = tensor.clone()  # what follows may write into it

    with ExitStack() as hooks:
        for stage, module in modules.items():
            hook = module.register_forward_hook(partial(keep, stage))
            hooks.enter_context(hook)
        yield found


def stages_of(
    inputs: Inputs, modules: Mapping[str, nn.Module], run: Callable[[], Any]
) -> list[Stages]:
    """The stages of each picture of a batch, without padding, as NumPy arrays in float32.

    Args:
        inputs: the batch.
        modules: each gives the stage of this name: tokens (B, N, C), or "pooled" (B, D).
        run: calls the model of which they are.
    """
    with recorded(modules) as found, torch.inference_mode():
        run()
    pictures: list[Stages] = []
    for number, grid in enumerate(inputs.grid):
        stages: Stages = {"grid": grid.int().numpy()}
        for stage, tensor in {"pixels": inputs.pixels, **found}.items():
            one = tensor[number].float().cpu()
            if stage != "pooled":
                one = one[: grid.prod()]  # (N, C) -> (h * w, C)
            stages[stage] = one.numpy()
        pictures.append(stages)
    return pictures


def build_tower(model: Any, config: Mapping[str, Any]) -> Any:
    """transformers' Siglip2 image tower with the weights of timm's ``model``.

    Args:
        model: a NaFlexVit of SigLIP-2's design, with or without the head that pools.
        config: transformers' settings; what they leave open follows from the model.

    Raises:
        RuntimeError: transformers has no Siglip2, or ``config`` is that of other weights.
        ValueError: the model is no Siglip2 tower; counts and names the tensors.
    """
    weights = siglip2_weights(model)
    settings: dict[str, Any] = dict(
        hidden_size=model.embed_dim,
        intermediate_size=model.blocks[0].mlp.fc1.out_features,
        num_hidden_layers=len(model.blocks),
        num_attention_heads=model.blocks[0].attn.num_heads,
        num_patches=len(weights["embeddings.position_embedding.weight"]),
        patch_size=model.embeds.patch_size[0],
    )
    settings |= config
    settings["vision_use_head"] = model.attn_pool is not None
    with load_errors("transformers' tower", HOW_TO_BUILD):
        from transformers import Siglip2VisionConfig, Siglip2VisionModel

        tower = Siglip2VisionModel(Siglip2VisionConfig.from_dict(settings))
        getattr(tower, "vision_model", tower).load_state_dict(weights)
    return tower.eval()


def siglip2_weights(model: Any) -> dict[str, Tensor]:
    """The weights of timm's ``model`` under transformers' names.

    Raises:
        ValueError: the model is no Siglip2 tower; counts and names the tensors.
    """
    # A classifier is left out: what it takes is compared, not what it gives.
    own = model.state_dict()
    image_tower = {name: own[name] for name in own if not name.startswith("head.")}
    if not getattr(model.embeds, "channels_last", True):
        image_tower[PATCHES] = channels_last(image_tower[PATCHES])
    return dict(to_transformers(image_tower))


def build_processor(
    model: Any, max_patches: int | None = None, folder: str | Path | None = None
) -> tuple[Any, list[str]]:
    """transformers' image processor; with the settings of ``folder``, where it holds some.

    Args:
        model: a NaFlexVit, whose patches the processor has to make.
        max_patches: most patches of a picture, whatever the folder says.
        folder: where preprocessor_config.json may lie.

    Returns:
        The processor, and in words which settings of the folder other values are taken for.

    Raises:
        ValueError: it does not resize pictures.
        RuntimeError: the folder's file cannot be read.
    """
    from transformers import Siglip2ImageProcessor

    processor = Siglip2ImageProcessor()
    is_saved = folder is not None and Path(folder, PROCESSOR).is_file()
    if is_saved:
        with load_errors(f"{folder}/{PROCESSOR}", "give it as save_pretrained writes it"):
            processor = Siglip2ImageProcessor.from_pretrained(folder)
    if not processor.do_resize:
        raise ValueError(
            f"{folder}/{PROCESSOR} has do_resize false: pictures of any size fill no grid of "
            "patches; valid: true"
        )
    notes = []
    taken = {"patch_size": model.embeds.patch_size[0], "max_num_patches": max_patches}
    for name, value in taken.items():
        own = getattr(processor, name)
        if value and own != value:
            setattr(processor, name, value)
            if is_saved:
                notes.append(f"{PROCESSOR} says {name} {own}, but {value} is taken")
    return processor, notes
