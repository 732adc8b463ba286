"""Export a NaFlexVit to one file, and compare each runtime's result with timm's own eager code.

Tests: tests/commands/cli/test_export.py.
"""

import copy
import json
import logging
import math
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ... import enable
from .bench.model import random_batch
from .output import printable, progress, written_whole

Inputs = dict[str, Tensor]
Run = Callable[[Inputs], Any]
# The grids of batches: the first is exported, and the files are compared on the others.
BATCHES = (
    [(4, 6), (7, 3), (5, 5)],
    [(3, 20), (18, 2), (9, 9), (1, 17)],
    [(13, 14)],
)
# How far a runtime may be off, relative to the largest number. Runtimes add up in another order;
# what is wrong in a model is off by 1e-2 and more. The embeddings alone: what holds in PyTorch.
TOLERANCES = {"model": 1e-4, "embeddings": 2e-6}
METADATA = "metadata.json"  # the name that a .pt2 file gives its metadata


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


def make_inputs(model: Any, size: tuple[int, int] | None) -> tuple[list[Inputs], Any]:
    """NaFlex batches, or plain images of ``size`` pixels.

    Returns:
        The inputs with which a model is exported, and then those on which it is compared; and the
        dimensions of each input that may have other sizes, {name: {dimension: Dim}}.
    """
    torch.manual_seed(0)
    free = {0: torch.export.Dim("batch", min=1, max=4096)}
    if size is None:
        batches = [random_batch(model, grids) for grids in BATCHES]
        free[1] = torch.export.Dim("tokens", min=2, max=65536)
    else:
        batches = [{"image": torch.randn(n, model.embeds.in_chans, *size)} for n in (2, 3, 1)]
    return batches, {name: free for name in batches[0]}


def position_embeddings(model: Any) -> Any:
    """The embeddings of a model, in which everything that is no position is 0."""
    embeds = copy.deepcopy(model.embeds)
    for name, parameter in embeds.named_parameters():
        # Of a learned table, or of the two of a factorized one.
        if not name.startswith("pos_embed"):
            parameter.data.zero_()
    return embeds


def export(
    model: Any,
    out: Path,
    runtimes: Sequence[str],
    size: tuple[int, int] | None,
    metadata: Mapping[str, str],
) -> tuple[list[dict[str, Any]], bool]:
    """Export ``model`` and compare the file; it takes the place ``out`` if every runtime is right.

    Args:
        model: a NaFlexVit in eval mode.
        out: where the file goes, ``.onnx`` or ``.pt2``.
        runtimes: those that run it, names of ``LOADERS``.
        size: of plain images, in pixels; None: for NaFlex batches.
        metadata: texts by their names, which the file keeps.

    Returns:
        The checks, one for each runtime: ``runtime``; ``differences`` relative to the largest
        number, of the "model", and of the position "embeddings" alone, None where a wrong file would
        have given the same; ``right``, whether they are allowed, as NaN is not. And whether every
        runtime is right, and so the file was written.
    """
    check_space(model, out)
    (example, *unseen), free = make_inputs(model, size)
    checks: list[dict[str, Any]] = [
        {"runtime": runtime, "differences": {}, "right": True} for runtime in runtimes
    ]
    bar = progress("exporting and comparing", total=2 * (1 + len(runtimes)))
    with torch.no_grad(), TemporaryDirectory() as aside, written_whole(out) as made, bar:
        parts = {
            "model": (model, made),
            "embeddings": (position_embeddings(model), Path(aside, out.name)),
        }
        for part, (exported, file) in parts.items():
            module = Naflex(exported).eval()
            # What timm's own code gives is what the file has to give.
            with enable("stock", model=module):
                wanted = [module(**inputs) for inputs in unseen]
            with enable("matmul", model=module, strict=True):
                program = write(module, example, free, file, metadata)
            bar.update()
            could_fail = _could_fail(part, wanted)
            for check in checks:
                run = LOADERS[check["runtime"]](file, program)
                off = largest_difference(run, unseen, wanted)
                is_right = off <= TOLERANCES[part]
                check["right"] &= is_right
                check["differences"][part] = off if could_fail or not is_right else None
                bar.update()

        is_right = all(check["right"] for check in checks)
        if not is_right:
            # ONNX keeps weights beside the file above 1.5 GB.
            for written in made.parent.iterdir():
                written.unlink()
    return checks, is_right


def check_space(model: torch.nn.Module, out: Path) -> None:
    """Find out whether the disk has room for the file, and for what a writer keeps besides.

    Raises:
        OSError: it has not. (PyTorch's writer would end the process when the disk is full.)
    """
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    free = shutil.disk_usage(out.resolve().parent).free
    if free < 2 * weights:
        raise OSError(
            f"{printable(out)} needs {2 * weights / 1e6:,.1f} MB of free space, twice the weights; "
            f"there are {free / 1e6:,.1f}"
        )


def write(
    module: torch.nn.Module,
    example: Inputs,
    free: Any,
    file: Path,
    metadata: Mapping[str, str] = {},
) -> Any:
    """Export the module as it is patched now, write the file, return torch.export's program.

    Args:
        module: takes ``example`` by its names.
        example: of the inputs.
        free: the dimensions that may have other sizes, {name: {dimension: Dim}}.
        file: where to write, ``.onnx`` or ``.pt2``.
        metadata: texts by their names, which the file keeps.
    """
    # A line for each operator that it does not fold.
    logging.getLogger("onnxscript").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's, about its own steps
        program = torch.export.export(module, (), example, dynamic_shapes=free, strict=False)
        if file.suffix == ".pt2":
            texts = {METADATA: json.dumps(dict(metadata), indent=1)}
            torch.export.save(program, file, extra_files=texts)
        else:
            converted: Any = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                output_names=["output"],
                dynamic_shapes=free,  # the program has forgotten the names of its dimensions
            )
            # The exporter takes no metadata: they go into its result before that is written.
            converted.model.metadata_props.update(metadata)
            converted.save(file)
    return program


def largest_difference(run: Run, batches: Sequence[Inputs], wanted: Sequence[Tensor]) -> float:
    """Of all batches, relative to the largest output of each; NaN if one has NaN.

    Infinity where a runtime gives another shape or dtype: a difference would broadcast, and be 0.
    """
    largest = torch.zeros(())
    for inputs, want in zip(batches, wanted):
        output = torch.as_tensor(run(inputs))
        if (output.shape, output.dtype) != (want.shape, want.dtype):
            return math.inf
        # What has no embeddings at all is 0 everywhere, and must be so in the file.
        scale = want.abs().max().clamp(min=1e-12)
        largest = torch.maximum(largest, (output - want).abs().max() / scale)
    return largest.item()


def _could_fail(part: str, wanted: Sequence[Tensor]) -> bool:
    """Whether a file that is wrong would give something else.

    Not where the model gives every picture the same, and where there are no position embeddings.
    """
    if part == "embeddings":
        return any(want.any() for want in wanted)
    return any((want != want[:1]).any() for want in wanted)


def _torch(file: Path, program: Any) -> Run:
    if file.suffix == ".pt2":
        program = torch.export.load(file)
    module = program.module()
    return lambda inputs: module(**inputs)


def _onnxruntime(file: Path, program: Any) -> Run:
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return partial(_run_numpy, partial(session.run, None))


def _openvino(file: Path, program: Any) -> Run:
    """In float32: by default it computes in bfloat16 where the processor can."""
    import openvino

    hint = {"INFERENCE_PRECISION_HINT": "f32"}
    return partial(_run_numpy, openvino.Core().compile_model(file, "CPU", hint))


def _run_numpy(program: Callable[[dict[str, Any]], Any], inputs: Inputs) -> Any:
    """The first output of a program that takes NumPy's arrays."""
    return program({name: tensor.numpy() for name, tensor in inputs.items()})[0]


# Each gives a function that runs the file in float32.
LOADERS = {
    "torch.export": _torch,
    "ONNX Runtime": _onnxruntime,
    "OpenVINO": _openvino,
}
