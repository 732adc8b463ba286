"""From pictures to what each stage of an image tower gives: timm's pipeline and transformers'.

Tests: tests/commands/measure/test_pipelines.py.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from ...names import BASELINE
from ...patching.install import enable
from ...pictures import settings_of, transform_of
from .bench.workloads import coordinates
from .models import load_errors
from .output import progress
from .tower_names import to_transformers

# The modules that end a stage; blocks beside them.
TIMM = {
    "embeds.proj": "patch_embedding",
    "embeds": "position_embedding",
    "norm": "norm",
    "attn_pool": "pooled",
}
SIGLIP2 = {
    "embeddings.patch_embedding": "patch_embedding",
    "embeddings": "position_embedding",
    "post_layernorm": "norm",
    "head": "pooled",
}
BLOCK = re.compile(r"(?:blocks|encoder\.layers)\.(\d+)")

Pictures = Sequence[Any]  # PIL images in RGB
Stages = dict[str, Any]  # of one picture, by stage: grid (2,), tokens (h * w, C), pooled (D,)


@dataclass(frozen=True)
class Source:
    """A library's way from pictures to the stages of its image tower.

    Attributes:
        words: which pipeline it is, and its settings.
        read_one: from a picture to its grid (h, w), and its pixels (h * w, y * x * channel).
        network: the library's tower, in eval mode.
        names: the stages that end with a module, by the module's name.
        call: calls the network, or a copy, with a picture: its grid (1, 2), and its pixels
            (1, h * w, y * x * channel), row by row.
        model: the timm NaFlexVit that holds the weights.
        max_patches: most patches of a picture.
        filter: of the resize of pictures.
    """

    words: str
    read_one: Callable[[Any], tuple[Tensor, Tensor]]
    network: Any
    names: Mapping[str, str]
    call: Callable[[Any, Tensor, Tensor], None]
    model: Any
    max_patches: int
    filter: str

    def read(self, pictures: Pictures) -> list[Stages]:
        """The grid and the pixels of each picture."""
        found = []
        for picture in pictures:
            grid, pixels = self.read_one(picture)
            found.append({"grid": grid.int().numpy(), "pixels": pixels.numpy()})
        return found

    def tower(self, given: Sequence[Stages], precision: str = "float32") -> list[Stages]:
        """All stages of each picture alone, from its grid and pixels.

        The tower computes in a precision; or in float32 with weights of 8 bits ("int8_by_row").
        """
        dtype = getattr(torch, precision, torch.float32)
        network = copy.deepcopy(self.network).to(dtype)
        if precision.startswith("int8"):
            for parameter in network.parameters():
                parameter.data = of_8_bits(parameter.data, precision)
        modules = {}
        for name, module in network.named_modules():
            block = BLOCK.fullmatch(name)
            if block:
                modules[module] = f"block_{block[1]}"
            elif name in self.names:
                modules[module] = self.names[name]
        made = []
        for own in progress(f"pictures, {precision}", given):
            grid = torch.tensor(own["grid"], dtype=torch.long)
            pixels = torch.tensor(own["pixels"], dtype=dtype)
            with recorded(modules) as found, torch.inference_mode():
                self.call(network, grid[None], pixels[None])
            stages = {"grid": own["grid"], "pixels": pixels.float().numpy()}
            for stage, tensor in found.items():
                stages[stage] = tensor[0].float().numpy()  # (h * w, C), or (D,)
            made.append(stages)
        return made


def of_8_bits(weight: Tensor, how: str) -> Tensor:
    """A kernel or table (..., D) rounded to 255 steps of a scale; vectors stay as they are.

    Args:
        weight: the numbers.
        how: what has a scale of its own: "int8_by_block" (32 numbers, or a row that they do not
            divide), "int8_by_row" or "int8_by_tensor".
    """
    if weight.ndim < 2:
        return weight
    row = weight.shape[-1]
    block = row if row % 32 else 32
    length = {"int8_by_block": block, "int8_by_row": row, "int8_by_tensor": weight.numel()}[how]
    groups = weight.reshape(-1, length)
    scale = groups.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    steps = torch.round(groups / scale)
    return (steps * scale).reshape(weight.shape)


@contextmanager
def recorded(stages: Mapping[nn.Module, str]) -> Iterator[dict[str, Tensor]]:
    """What each of these modules gives inside, under its stage's name, in the order of the calls."""
    found: dict[str, Tensor] = {}

    def keep(module: nn.Module, _: Any, output: Any) -> None:
        if module in stages:
            tensor = output[0] if isinstance(output, tuple) else output
            found[stages[module]] = tensor.clone()  # what follows may write into it

    with register_module_forward_hook(keep):
        yield found


def timm_source(
    model: Any, max_patches: int, interpolation: str | None = None, mode: Any = BASELINE
) -> Source:
    """timm's own transforms, and a NaFlexVit whose table is resampled in a mode.

    Args:
        model: a NaFlexVit in eval mode.
        max_patches: most patches of a picture.
        interpolation: filter of the resize, in place of the data configuration's.
        mode: of the position table alone.
    """
    settings = settings_of(model) | {"max_seq_len": str(max_patches)}
    if interpolation:
        settings["interpolation"] = interpolation
    prepare = transform_of(settings)

    def read(picture: Any) -> tuple[Tensor, Tensor]:
        sample = prepare(picture)
        return sample["patch_coord"].amax(0) + 1, sample["patches"]

    def call(network: Any, grid: Tensor, pixels: Tensor) -> None:
        coord = coordinates(grid.tolist())
        with enable("stock", pos_embed=mode, model=network):
            network(pixels, coord, torch.ones(coord.shape[:2], dtype=torch.bool))

    return Source(
        words=f"timm, {mode}",
        read_one=read,
        network=model,
        names=TIMM,
        call=call,
        model=model,
        max_patches=max_patches,
        filter=settings["interpolation"],
    )


def transformers_source(model: Any, max_patches: int | None, folder: Path) -> Source:
    """transformers' own image processor and Siglip2 image tower, with the weights of timm's ``model``.

    Args:
        model: a NaFlexVit of SigLIP-2's design.
        max_patches: most patches of a picture; None: that of the processor.
        folder: where transformers' settings of the tower and of the processor lie.

    Raises:
        RuntimeError: transformers has no Siglip2, or the folder's settings are those of other weights.
        ValueError: the model is no Siglip2 tower; counts and names the tensors.
    """
    weights = siglip2_weights(model)
    advice = "pip install -U transformers; config.json and preprocessor_config.json must lie there"
    with load_errors(f"transformers' tower and processor of {folder}", advice):
        from PIL.Image import Resampling
        from transformers import Siglip2ImageProcessor, Siglip2VisionConfig, Siglip2VisionModel

        processor = Siglip2ImageProcessor.from_pretrained(folder)
        tower = Siglip2VisionModel(Siglip2VisionConfig.from_pretrained(folder))
        tower.load_state_dict(weights)
    processor.max_num_patches = max_patches or processor.max_num_patches

    def read(picture: Any) -> tuple[Tensor, Tensor]:
        batch = processor(images=[picture], return_tensors="pt")
        (grid,) = batch["spatial_shapes"]
        return grid, batch["pixel_values"][0, : grid.prod()]

    def call(network: Any, grid: Tensor, pixels: Tensor) -> None:
        with enable("stock", library="transformers"):
            network(pixels, torch.ones(pixels.shape[:2], dtype=torch.long), grid)

    return Source(
        words=f"transformers {version('transformers')}",
        read_one=read,
        network=tower.eval(),
        names=SIGLIP2,
        call=call,
        model=model,
        max_patches=processor.max_num_patches,
        filter=Resampling(processor.resample).name.lower(),
    )


def siglip2_weights(model: Any) -> dict[str, Tensor]:
    """The weights of timm's ``model`` under transformers' names.

    Raises:
        ValueError: the model is no Siglip2 tower (counts and names the tensors), or takes patches
            in another order.
    """
    if not getattr(model.embeds, "channels_last", True):
        raise ValueError("its patches are (channel, y, x): leave patchify_channels_last out")
    # A classifier is left out: what it takes is compared, not what it gives.
    own = model.state_dict()
    image_tower = {name: own[name] for name in own if not name.startswith("head.")}
    return to_transformers(image_tower)
