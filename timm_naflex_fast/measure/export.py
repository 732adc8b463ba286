"""Export a NaFlexVit to one file, and compare each runtime's result with timm's own eager code."""

import copy
import logging
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import enable
from .bench.model import random_batch

Inputs = dict[str, Tensor]
# Grids of batches, and their length: the first is exported, and the files are compared on the others.
BATCHES: list[tuple[Any, int]] = [
    ([(4, 6), (7, 3), (5, 5)], 30),
    ([(3, 20), (18, 2), (9, 9), (1, 17)], 90),
    ([(13, 14)], 182),
]
# How far a runtime may be off, relative to the largest number. Runtimes add up in another order;
# what is wrong in a model is off by 1e-2 and more. The embeddings alone: what holds in PyTorch.
TOLERANCES = {"model": 1e-4, "embeddings": 2e-6}
RUN = {
    ".onnx": """import onnxruntime
session = onnxruntime.InferenceSession({file!r})
inputs = dict({inputs})  # NumPy arrays
(output,) = session.run(None, inputs)""",
    ".pt2": """import torch
program = torch.export.load({file!r}).module()
inputs = dict({inputs})  # tensors
output = program(**inputs)""",
}


class Naflex(torch.nn.Module):
    """A NaFlexVit, or its NaFlexEmbeds, whose inputs have the names of timm's loader.

    Plain images are ``image``.
    """

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(
        self,
        patches: Tensor | None = None,
        patch_coord: Tensor | None = None,
        patch_valid: Tensor | None = None,
        image: Tensor | None = None,
    ) -> Any:
        """The model's output, or the embeddings' tokens."""
        pixels = patches if image is None else image
        output = self.model(pixels, patch_coord=patch_coord, patch_valid=patch_valid)
        if isinstance(output, tuple):  # of embeddings: the tokens and the grid
            return output[0]
        return output


class Found(NamedTuple):
    """What the comparison found.

    Attributes:
        differences: of each runtime, relative to the largest number: of the "model", and of the
            position "embeddings" alone.
        inputs: their names in the file.
        dtypes: of all tensors in the program.
        right: whether every runtime is right, and so the file was written.
    """

    differences: dict[str, dict[str, float]]
    inputs: list[str]
    dtypes: list[str]
    right: bool


def make_inputs(model: Any, size: tuple[int, int] | None) -> tuple[list[Inputs], Any]:
    """NaFlex batches, or plain images of ``size`` pixels.

    Returns:
        The inputs with which a model is exported, and then those on which it is compared; and the
        dimensions of each input that may have other sizes, {name: {dimension: Dim}}.
    """
    torch.manual_seed(0)
    images = torch.export.Dim("batch", min=1, max=4096)
    if size is not None:
        plain = [{"image": torch.randn(n, model.embeds.in_chans, *size)} for n in (2, 3, 1)]
        return plain, {"image": {0: images}}
    tokens = torch.export.Dim("length", min=2, max=65536)
    batches = [random_batch(model, *batch) for batch in BATCHES]
    return batches, {name: {0: images, 1: tokens} for name in batches[0]}


def position_embeddings(model: Any) -> Any:
    """The embeddings of a model, in which everything that is no position is 0."""
    embeds = copy.deepcopy(model.embeds)
    for name, parameter in embeds.named_parameters():
        if not name.startswith("pos_embed"):
            parameter.data.zero_()
    return embeds


def export(
    model: Any,
    out: Path,
    runtimes: Sequence[str],
    size: tuple[int, int] | None = None,
) -> Found:
    """Export ``model`` and compare the file; it takes the place ``out`` if every runtime is right.

    Args:
        model: a NaFlexVit in eval mode.
        out: where the file goes, ``.onnx`` or ``.pt2``.
        runtimes: those that run it, names of ``LOADERS``.
        size: of plain images, in pixels; None: for NaFlex batches.
    """
    (example, *unseen), free = make_inputs(model, size)
    differences: dict[str, dict[str, float]] = {runtime: {} for runtime in runtimes}
    dtypes = set()
    # In the folder of ``out``, so that a file can take its place without being copied.
    folder = tempfile.TemporaryDirectory(dir=out.resolve().parent, prefix=f".{out.name}.")
    with torch.no_grad(), folder as parts:
        for part, exported in (("model", model), ("embeddings", position_embeddings(model))):
            module = Naflex(exported).eval()
            file = Path(parts, part, out.name)
            file.parent.mkdir()
            with enable("stock", model=module):
                wanted = [module(**inputs) for inputs in unseen]
            with enable("matmul", model=module, strict=True):
                program = write(module, example, free, file)
            dtypes |= dtypes_of(program)
            for runtime in runtimes:
                run = LOADERS[runtime](file, program)
                differences[runtime][part] = _largest_difference(run, unseen, wanted)
        right = all(map(is_right, differences.values()))
        if right:
            # ONNX keeps weights beside the file above 1.5 GB.
            for made in Path(parts, "model").iterdir():
                made.replace(out.resolve().with_name(made.name))
    return Found(differences, list(example), sorted(dtypes), right)


def is_right(differences: dict[str, float]) -> bool:
    """Whether a runtime's differences are allowed; NaN is not."""
    return all(off <= TOLERANCES[part] for part, off in differences.items())


def dtypes_of(program: Any) -> set[str]:
    """The dtypes of all tensors in a program of ``torch.export``, of inner graphs too."""
    found = set()
    for module in program.graph_module.modules():
        for node in module.graph.nodes if hasattr(module, "graph") else ():
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                found.add(str(value.dtype).removeprefix("torch."))
    return found


def write(module: torch.nn.Module, example: Inputs, free: Any, file: Path) -> Any:
    """Export the module as it is patched now, write the file, return torch.export's program."""
    # A line for each operator that it does not fold.
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's, about its own steps
        program = torch.export.export(module, (), example, dynamic_shapes=free, strict=False)
        if file.suffix == ".pt2":
            torch.export.save(program, file)
        else:
            converted: Any = torch.onnx.export(
                program, dynamo=True, verbose=False, output_names=["output"]
            )
            converted.save(file)
    return program


def how_to_run(out: Path, names: list[str]) -> str:
    """Lines of Python that run the file."""
    inputs = ", ".join(f"{name}={name}" for name in names)
    return RUN[out.suffix].format(file=str(out), inputs=inputs)


def _largest_difference(
    run: Callable[[Inputs], Any], batches: Sequence[Inputs], wanted: Sequence[Tensor]
) -> float:
    """Of all batches, relative to the largest output of each; NaN if one has NaN."""
    found = []
    for inputs, want in zip(batches, wanted):
        got = torch.as_tensor(run(inputs))
        found.append((got - want).abs().max() / want.abs().max().clamp(min=1e-12))
    return torch.stack(found).max().item()


def _torch(file: Path, program: Any) -> Callable[[Inputs], Any]:
    if file.suffix == ".pt2":
        program = torch.export.load(file)
    module = program.module()
    return lambda inputs: module(**inputs)


def _onnxruntime(file: Path, program: Any) -> Callable[[Inputs], Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(None, _numpy(inputs))[0]


def _openvino(file: Path, program: Any) -> Callable[[Inputs], Any]:
    import openvino

    compiled = openvino.Core().compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda inputs: compiled(_numpy(inputs))[0]


def _numpy(inputs: Inputs) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in inputs.items()}


LOADERS = {"torch.export": _torch, "ONNX Runtime": _onnxruntime, "OpenVINO": _openvino}
