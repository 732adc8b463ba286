"""Export a NaFlexVit to one file, and compare what each runtime computes from the file with timm's
own eager code."""

import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import enable
from .bench.model import random_batch

Inputs = dict[str, Tensor]
EXAMPLE = [(4, 6), (7, 3), (5, 5)], 30
"""The grids of the batch that is exported, and its length; the files are compared on ``UNSEEN``
alone."""
UNSEEN = ([(3, 20), (18, 2), (9, 9), (1, 17)], 90), ([(6, 10), (20, 3)], 60), ([(13, 14)], 182)
TOLERANCE = 1e-4  # of the largest output: runtimes add up in another order; what is wrong is off by 1e-2 and more
RUN_ONNX = """import onnxruntime
session = onnxruntime.InferenceSession({file!r})
inputs = dict({inputs})  # NumPy arrays
(output,) = session.run(None, inputs)"""
RUN_PT2 = """import torch
program = torch.export.load({file!r}).module()
inputs = dict({inputs})  # tensors
output = program(**inputs)"""


def runtimes_for(out: Path) -> list[str]:
    """The runtimes that can run such a file here. Raises ValueError for another suffix,
    RuntimeError for what lacks."""
    if out.suffix == ".pt2":
        return ["torch.export"]
    if out.suffix != ".onnx":
        raise ValueError(f"--out must end with .onnx or .pt2; got {out.name}")
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise RuntimeError(
            f".onnx files need {' and '.join(missing)}: pip install {' '.join(missing)}"
        )
    modules = {"torch.export": "torch", "ONNX Runtime": "onnxruntime", "OpenVINO": "openvino"}
    return [name for name, module in modules.items() if find_spec(module)]


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


def batches(
    model: Any, size: tuple[int, int] | None
) -> tuple[torch.nn.Module, Inputs, list[Inputs], Any]:
    """The module to export, the inputs it is exported with, those it is compared on, and the free
    dimensions."""
    torch.manual_seed(0)
    free = torch.export.Dim("batch", min=1, max=4096), torch.export.Dim("length", min=2, max=65536)
    if size is None:
        example, *unseen = (random_batch(model, *batch) for batch in (EXAMPLE, *UNSEEN))
        return (
            Naflex(model).eval(),
            example,
            unseen,
            {name: dict(enumerate(free)) for name in example},
        )
    example, *unseen = (
        dict(image=torch.randn(number, model.embeds.in_chans, *size)) for number in (2, 3, 1)
    )
    return Plain(model).eval(), example, unseen, {"image": {0: free[0]}}


def export(
    model: Any,
    out: Path,
    size: tuple[int, int] | None = None,
    advance: Callable[[], Any] = lambda: None,
) -> tuple[dict[str, float], dict[str, str], bool]:
    """Export ``model`` and compare the file; it takes the place ``out`` if every runtime is right.

    Returns:
        The largest difference in each runtime, relative to the largest output; the inputs with
        their shapes and dtypes; and whether every runtime is right.
    """
    module, example, unseen, free = batches(model, size)
    with torch.no_grad(), enable("stock", model=model):
        wanted = [module(**inputs) for inputs in unseen]
    advance()
    folder = tempfile.TemporaryDirectory(dir=out.resolve().parent, prefix=f".{out.name}.")
    with torch.no_grad(), folder as part:
        file = Path(part, out.name)
        with enable("matmul", model=model, strict=True):
            program = write(module, example, free, file)
        advance()
        differences = {}
        for runtime in runtimes_for(out):
            run = LOADERS[runtime](file, program)
            parts = [_difference(run(inputs), want) for inputs, want in zip(unseen, wanted)]
            differences[runtime] = max(
                parts, key=lambda part: (part != part, part)
            )  # NaN is the largest
            advance()
        right = all(difference <= TOLERANCE for difference in differences.values())
        for made in (
            sorted(Path(part).iterdir(), reverse=True) if right else ()
        ):  # weights above 1.5 GB are beside it
            os.replace(made, out.resolve().with_name(made.name))
    shapes = {}
    for name, tensor in example.items():
        sizes = [
            free[name][dim].__name__ if dim in free[name] else str(n)
            for dim, n in enumerate(tensor.shape)
        ]
        shapes[name] = f"({', '.join(sizes)}) {str(tensor.dtype).removeprefix('torch.')}"
    return differences, shapes, right


def write(module: torch.nn.Module, example: Inputs, free: Any, file: Path) -> Any:
    """Export the module as it is patched now, write the file, return the program of
    ``torch.export``."""
    logging.getLogger("onnxscript").setLevel(
        logging.ERROR
    )  # a line for each operator that it does not fold
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


def _difference(got: Any, want: Tensor) -> float:
    return ((torch.as_tensor(got) - want).abs().max() / want.abs().max().clamp(min=1e-12)).item()


def _torch(file: Path, program: Any) -> Callable[[Inputs], Any]:
    module = (torch.export.load(file) if file.suffix == ".pt2" else program).module()
    return lambda inputs: module(**inputs)


def _onnxruntime(file: Path, program: Any) -> Callable[[Inputs], Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda inputs: session.run(
        None, {name: tensor.numpy() for name, tensor in inputs.items()}
    )[0]


def _openvino(file: Path, program: Any) -> Callable[[Inputs], Any]:
    import openvino

    compiled = openvino.Core().compile_model(file, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda inputs: compiled({name: tensor.numpy() for name, tensor in inputs.items()})[0]


LOADERS = {"torch.export": _torch, "ONNX Runtime": _onnxruntime, "OpenVINO": _openvino}
