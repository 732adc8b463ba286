"""Export a NaFlexVit to one file, and compare each runtime's result with timm's own eager code."""

import logging
import math
import os
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
EXAMPLE = [(4, 6), (7, 3), (5, 5)], 30
"""The grids of the batch that is exported, and its length; the files are compared on ``UNSEEN``
alone."""
UNSEEN = ([(3, 20), (18, 2), (9, 9), (1, 17)], 90), ([(6, 10), (20, 3)], 60), ([(13, 14)], 182)
# Of the largest output: runtimes add up in another order; what is wrong is off by 1e-2 and more.
TOLERANCE = 1e-4
RUN_ONNX = """import onnxruntime
session = onnxruntime.InferenceSession({file!r})
inputs = dict({inputs})  # NumPy arrays
(output,) = session.run(None, inputs)"""
RUN_PT2 = """import torch
program = torch.export.load({file!r}).module()
inputs = dict({inputs})  # tensors
output = program(**inputs)"""


class Naflex(torch.nn.Module):
    """A NaFlexVit whose inputs have the names of timm's loader."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, patches: Tensor, patch_coord: Tensor, patch_valid: Tensor) -> Tensor:
        """The model's output."""
        return self.model(patches, patch_coord=patch_coord, patch_valid=patch_valid)


class Plain(Naflex):
    """The same for plain images."""

    def forward(self, image: Tensor) -> Tensor:  # type: ignore[override]
        """The model's output."""
        return self.model(image)


class Task(NamedTuple):
    """What is exported, and with what it is compared.

    Attributes:
        module: computes what is exported.
        example: the inputs with which it is exported.
        unseen: the inputs on which it is compared.
        free: the dimensions of each input that may have other sizes: {name: {dimension: Dim}}.
    """

    module: torch.nn.Module
    example: Inputs
    unseen: list[Inputs]
    free: dict[str, dict[int, Any]]


class Found(NamedTuple):
    """What the comparison found.

    Attributes:
        differences: of each runtime, relative to the largest output.
        inputs: of the file, with their shapes and dtypes in words.
        right: whether every runtime is right, and so the file was written.
    """

    differences: dict[str, float]
    inputs: dict[str, str]
    right: bool


def make_task(model: Any, size: tuple[int, int] | None) -> Task:
    """The export of a model for NaFlex batches, or for plain images of ``size`` pixels."""
    torch.manual_seed(0)
    images = torch.export.Dim("batch", min=1, max=4096)
    tokens = torch.export.Dim("length", min=2, max=65536)
    if size is None:
        example = random_batch(model, *EXAMPLE)
        unseen = [random_batch(model, *batch) for batch in UNSEEN]
        free: dict[str, dict[int, Any]] = {name: {0: images, 1: tokens} for name in example}
        return Task(Naflex(model).eval(), example, unseen, free)
    batches = [{"image": torch.randn(n, model.embeds.in_chans, *size)} for n in (2, 3, 1)]
    return Task(Plain(model).eval(), batches[0], batches[1:], {"image": {0: images}})


def export(
    model: Any,
    out: Path,
    runtimes: Sequence[str],
    size: tuple[int, int] | None = None,
    advance: Callable[[], Any] = lambda: None,
) -> Found:
    """Export ``model`` and compare the file; it takes the place ``out`` if every runtime is right.

    Args:
        model: a NaFlexVit in eval mode.
        out: where the file goes, ``.onnx`` or ``.pt2``.
        runtimes: those that run it, names of ``LOADERS``.
        size: of plain images, in pixels; None: for NaFlex batches.
        advance: called when a part is done: two, and one for each runtime.
    """
    task = make_task(model, size)
    with torch.no_grad(), enable("stock", model=model):
        wanted = [task.module(**inputs) for inputs in task.unseen]
    advance()
    # In the folder of ``out``, so that a file can take its place without being copied.
    folder = tempfile.TemporaryDirectory(dir=out.resolve().parent, prefix=f".{out.name}.")
    with torch.no_grad(), folder as part:
        file = Path(part, out.name)
        with enable("matmul", model=model, strict=True):
            program = write(task.module, task.example, task.free, file)
        advance()
        differences = {}
        for runtime in runtimes:
            run = LOADERS[runtime](file, program)
            differences[runtime] = _largest_difference(run, task.unseen, wanted)
            advance()
        right = all(difference <= TOLERANCE for difference in differences.values())
        if right:
            _replace(Path(part), out.resolve())
    inputs = {name: _shape(tensor, task.free[name]) for name, tensor in task.example.items()}
    return Found(differences, inputs, right)


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
    text = RUN_PT2 if out.suffix == ".pt2" else RUN_ONNX
    return text.format(file=str(out), inputs=", ".join(f"{name}={name}" for name in names))


def _replace(folder: Path, out: Path) -> None:
    """Move the file and its weights, which ONNX keeps beside it above 1.5 GB, to where ``out`` is."""
    weights_first = sorted(folder.iterdir(), reverse=True)
    for made in weights_first:
        os.replace(made, out.with_name(made.name))


def _shape(tensor: Tensor, free: dict[int, Any]) -> str:
    """An input's shape and dtype, e.g. "(batch, length, 2) int64"."""
    sizes = [str(size) for size in tensor.shape]
    for dimension, name in free.items():
        sizes[dimension] = name.__name__
    return f"({', '.join(sizes)}) {str(tensor.dtype).removeprefix('torch.')}"


def _largest_difference(
    run: Callable[[Inputs], Any], batches: Sequence[Inputs], wanted: Sequence[Tensor]
) -> float:
    """Of all batches, relative to the largest output of each; NaN if one has NaN."""
    largest = 0.0
    for inputs, want in zip(batches, wanted):
        got = torch.as_tensor(run(inputs))
        scale = want.abs().max().clamp(min=1e-12)
        difference = ((got - want).abs().max() / scale).item()
        if math.isnan(difference):
            return difference
        largest = max(largest, difference)
    return largest


def _torch(file: Path, program: Any) -> Callable[[Inputs], Any]:
    module = (torch.export.load(file) if file.suffix == ".pt2" else program).module()
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
