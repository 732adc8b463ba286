"""Race what ONNX Runtime and OpenVINO make of an exported model, beside timm's loop in PyTorch, which exports nothing.

uv run benchmarks/measure.py exported

A ViT-S, the embeddings alone and the whole model: 8 images with other grids each, padded to 256 tokens. timm's
``grid_sample`` exports too, but gives other embeddings.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import graphs
import torch
from torch import Tensor, nn

from timm_naflex_fast import enable
from timm_naflex_fast.measure.bench.race import BASELINE, Race, Timed, run

FLAG = "timm-flag-bilinear"
NAMES = ["patches", "patch_coord", "patch_valid"]


class Part(nn.Module):
    """A model, or its embeddings alone, that takes tensors in place of a dictionary."""

    def __init__(self, model: Any, whole: bool) -> None:
        super().__init__()
        self.model, self.whole = model.eval(), whole

    def forward(self, patches: Tensor, patch_coord: Tensor, patch_valid: Tensor) -> Tensor:
        """The model's output, or the embedded tokens."""
        if self.whole:
            return self.model(dict(zip(NAMES, (patches, patch_coord, patch_valid))))
        out = self.model.embeds(patches, patch_coord=patch_coord)
        return out[0] if isinstance(out, tuple) else out


def onnx_runtime(file: Path) -> Callable[[dict[str, Any]], Any]:
    """A function that runs the file on arrays by name."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = {one.name for one in session.get_inputs()}
    return lambda arrays: session.run(None, {name: arrays[name] for name in names})[0]


def openvino(file: Path) -> Callable[[dict[str, Any]], Any]:
    """The same, in float32 as PyTorch."""
    import openvino as ov

    compiled = ov.Core().compile_model(str(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    names = {one.any_name for one in compiled.inputs}
    return lambda arrays: compiled({name: arrays[name] for name in names})[0]


def rows(tiny: bool) -> Iterator[list[dict[str, Any]]]:
    """The rows of race after race: a part of the model in one runtime.

    ``about["counted"]`` holds how far a result is from PyTorch's, of its largest number; NaN: it holds NaN.

    Raises:
        ValueError: a runtime's result for this package's export is not that of PyTorch.
    """
    size = dict(depth=1, width=64) if tiny else dict(depth=12, width=384)
    batch = [*graphs.draw("timm", 256, 1).values()]
    arrays = {name: tensor.numpy() for name, tensor in zip(NAMES, batch)}
    images, tokens = torch.export.Dim("images", min=1, max=64), torch.export.Dim("tokens", min=2, max=4096)
    options: dict[str, Any] = dict(input_names=NAMES, dynamic_shapes=[{0: images, 1: tokens}] * 3, dynamo=True)
    for whole, runtime in product((False, True), (onnx_runtime, openvino)):
        part = Part(graphs.make("timm", "stock", **size), whole)
        wrong = dict[str, dict[str, float]]()
        contenders = [Timed(BASELINE, torch.no_grad()(lambda _, part=part: part(*batch)))]
        for name in (FLAG, "matmul"):
            with ExitStack() as on, tempfile.TemporaryDirectory() as folder, torch.no_grad():
                part = Part(graphs.make("timm", "timm's grid_sample" if name == FLAG else "stock", **size), whole)
                if name != FLAG:
                    on.enter_context(enable(name, model=part))
                file, want = Path(folder, "model.onnx"), part(*batch)
                torch.onnx.export(part, tuple(graphs.draw("timm", 64, 2).values()), file, **options)
                loaded = runtime(file)
                off = (torch.as_tensor(loaded(arrays)) - want).abs().max() / want.abs().max()
            wrong[name] = {"wrong by": off.item()}
            if name != FLAG and not off < 1e-3:
                raise ValueError(f"{name} in {runtime.__name__} is off by {off:.1e} of the largest number")
            contenders.append(Timed(name, partial(lambda loaded, _: loaded(arrays), loaded)))
        title = "whole model" if whole else "embeddings"
        race = Race(
            "exported", title, runtime.__name__, len(batch[0]), "float32", tuple(contenders), {"counted": wrong}
        )
        yield run(race, 1 if tiny else 30, budget=10 if whole else 2)
