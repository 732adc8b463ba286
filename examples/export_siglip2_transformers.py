"""Export transformers' Siglip2 vision tower to ONNX, and run it in ONNX Runtime and OpenVINO.

    uv run examples/export_siglip2_transformers.py

Both compute in float32 and are compared with transformers itself; the example ends with an error if
one is wrong. The tower here is small and its weights are random: they stand in for yours. Needs
transformers, onnxscript, onnxruntime and openvino.
"""

import argparse
import tempfile
from collections.abc import Callable

import numpy as np
import torch

import timm_naflex_fast

NAMES = ("pixel_values", "pixel_attention_mask", "spatial_shapes")
Arrays = dict[str, np.ndarray]
Runtime = Callable[[Arrays], np.ndarray]


class Tower(torch.nn.Module):
    """The pooled output alone, from the three inputs that transformers' processor makes."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixel_values, pixel_attention_mask, spatial_shapes):
        """Patches (B, N, 768); which of them are real, (B, N); the grids (B, 2)."""
        return self.model(pixel_values, pixel_attention_mask, spatial_shapes).pooler_output


def make_tower() -> Tower:
    """A small tower with random weights: take your own here."""
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    config = Siglip2VisionConfig(
        num_patches=256,
        patch_size=16,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return Tower(Siglip2VisionModel(config)).eval()


def batch(grids: list[tuple[int, int]], length: int) -> tuple[torch.Tensor, ...]:
    """Random images of these grids, padded to ``length`` tokens, as the tower takes them."""
    sizes = torch.tensor(grids)
    tokens = sizes.prod(1, keepdim=True)  # (B, 1)
    mask = (torch.arange(length) < tokens).to(torch.int32)  # (B, N)
    patches = torch.randn(len(grids), length, 768) * mask[..., None]
    return patches, mask, sizes


def export(tower: Tower) -> torch.export.ExportedProgram:
    """The tower as a program for any number of images and of tokens."""
    images = torch.export.Dim("images")
    tokens = torch.export.Dim("tokens")
    dynamic = ({0: images, 1: tokens}, {0: images, 1: tokens}, {0: images})
    with torch.no_grad(), timm_naflex_fast.enable(library="transformers"):
        example = batch([(4, 6), (7, 3)], 28)
        program = torch.export.export(tower, example, dynamic_shapes=dynamic)
        print(f"who computed, and how often: {timm_naflex_fast.status().calls}")
    return program


def load_runtimes(program: torch.export.ExportedProgram) -> dict[str, Runtime]:
    """The program in each runtime, by way of a file."""
    import onnxruntime
    import openvino

    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/siglip2.onnx"
        torch.onnx.export(program, dynamo=True, verbose=False).save(file)
        session = onnxruntime.InferenceSession(file)
        core = openvino.Core()
        model = core.read_model(file)
        # By default OpenVINO computes in bfloat16 where the processor can.
        compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return {
        "ONNX Runtime": lambda arrays: session.run(None, arrays)[0],
        "OpenVINO": lambda arrays: compiled(arrays)[0],
    }


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    torch.manual_seed(0)
    tower = make_tower()
    runtimes = load_runtimes(export(tower))
    batches = {
        "padded": batch([(3, 20), (18, 2), (9, 9)], 90),
        "full": batch([(6, 10), (20, 3)], 60),
    }
    for what, inputs in batches.items():
        with torch.no_grad():
            want = tower(*inputs).numpy()
        arrays = {name: tensor.numpy() for name, tensor in zip(NAMES, inputs)}
        for runtime, run in runtimes.items():
            got = run(arrays)
            difference = abs(got - want).max() / abs(want).max()
            print(f"{what}, {runtime}: largest difference {difference:.1e} of the largest output")
            assert difference <= 1e-4


if __name__ == "__main__":
    main()
