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
EMBEDDINGS_TOLERANCE = 2e-6  # of the largest embedding, as in PyTorch
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


class Embeddings(Naflex):
    """The position embeddings alone, added to tokens (B, N, C)."""

    def forward(self, tokens: Tensor, patch_coord: Tensor) -> Tensor:  # type: ignore[override]
        """Adds them by the coordinates (B, N, 2)."""
        embeds: Any = self.model.embeds
        sampled = "_grid_sample" if embeds.pos_embed_use_grid_sample else ""
        add = getattr(embeds, f"_apply_{embeds.pos_embed_type}_naflex_pos_embed{sampled}")
        x = tokens * 1
        add(x, patch_coord=patch_coord)
        return x


class PlainEmbeddings(Naflex):
    """The same for plain images of ``grid`` (h, w) patches."""

    def __init__(self, model: torch.nn.Module, grid: tuple[int, int]):
        super().__init__(model)
        self.grid = grid

    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        """Adds them to each image."""
        embeds: Any = self.model.embeds
        x = tokens * 1
        getattr(embeds, f"_apply_{embeds.pos_embed_type}_pos_embed")(x, grid_size=self.grid)
        return x


class Task(NamedTuple):
    """What is exported, and with what it is compared.

    Attributes:
        module: computes what is exported.
        example: the inputs with which it is exported.
        unseen: the inputs on which it is compared.
        free: the dimensions of each input that may have other sizes: {name: {dimension: Dim}}.
        tolerance: how far a runtime may be off, relative to the largest output.
    """

    module: torch.nn.Module
    example: Inputs
    unseen: list[Inputs]
    free: dict[str, dict[int, Any]]
    tolerance: float = TOLERANCE


class Found(NamedTuple):
    """What the comparison found.

    Attributes:
        differences: of each runtime, relative to the largest output: of the model, and of the
            position embeddings alone if it has such.
        inputs: of the file, with their shapes and dtypes in words.
        dtypes: of all tensors in the program.
        right: whether every runtime is right, and so the file was written.
    """

    differences: dict[str, list[float]]
    inputs: dict[str, str]
    dtypes: list[str]
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


def make_embeddings_task(model: Any, size: tuple[int, int] | None) -> Task:
    """The export of its position embeddings alone: of zeros, so that nothing else is rounded."""
    width = model.embeds.embed_dim
    images = torch.export.Dim("batch", min=1, max=4096)
    tokens = torch.export.Dim("length", min=2, max=65536)
    if size is None:
        batches = []
        for grids, length in (EXAMPLE, *UNSEEN):
            patch_coord = random_batch(model, grids, length)["patch_coord"]
            zeros = torch.zeros(len(grids), length, width)
            batches.append({"tokens": zeros, "patch_coord": patch_coord})
        module: torch.nn.Module = Embeddings(model)
        free: dict[str, dict[int, Any]] = {name: {0: images, 1: tokens} for name in batches[0]}
    else:
        high, wide = model.embeds.patch_size
        grid = size[0] // high, size[1] // wide
        batches = [{"tokens": torch.zeros(n, grid[0] * grid[1], width)} for n in (2, 3, 1)]
        module = PlainEmbeddings(model, grid)
        free = {"tokens": {0: images}}
    return Task(module.eval(), batches[0], batches[1:], free, EMBEDDINGS_TOLERANCE)


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
    tasks = [make_task(model, size)]
    if model.embeds.pos_embed_type in ("learned", "factorized"):
        tasks.append(make_embeddings_task(model, size))
    with torch.no_grad(), enable("stock", model=model):
        wanted = [[task.module(**inputs) for inputs in task.unseen] for task in tasks]
    advance()
    # In the folder of ``out``, so that a file can take its place without being copied.
    folder = tempfile.TemporaryDirectory(dir=out.resolve().parent, prefix=f".{out.name}.")
    with torch.no_grad(), folder as part:
        folders = [Path(part, "model"), Path(part, "embeddings")]
        programs = []
        with enable("matmul", model=model, strict=True):
            for task, place in zip(tasks, folders):
                place.mkdir()
                programs.append(write(task.module, task.example, task.free, place / out.name))
        advance()
        differences: dict[str, list[float]] = {}
        right = True
        for runtime in runtimes:
            differences[runtime] = []
            for task, want, place, program in zip(tasks, wanted, folders, programs):
                run = LOADERS[runtime](place / out.name, program)
                difference = _largest_difference(run, task.unseen, want)
                differences[runtime].append(difference)
                right &= difference <= task.tolerance
            advance()
        if right:
            _replace(folders[0], out.resolve())
    example = tasks[0].example
    inputs = {name: _shape(tensor, tasks[0].free[name]) for name, tensor in example.items()}
    return Found(differences, inputs, dtypes_of(programs[0]), right)


def dtypes_of(program: Any) -> list[str]:
    """The dtypes of all tensors in a program of ``torch.export``, of inner graphs too."""
    found = set()
    for module in program.graph_module.modules():
        for node in module.graph.nodes if hasattr(module, "graph") else ():
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                found.add(str(value.dtype).removeprefix("torch."))
    return sorted(found)


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
