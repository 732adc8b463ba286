"""Export transformers' Siglip2 vision tower to ONNX and compare ONNX Runtime and OpenVINO with
transformers itself.

The tower here is small and its weights are random: they stand in for yours. Needs transformers,
onnxscript, onnxruntime and openvino. Run it: ``python examples/export_siglip2_transformers.py``. It
ends with an error if a runtime is wrong.
"""

import tempfile

import onnxruntime
import openvino
import torch
from transformers import Siglip2VisionConfig, Siglip2VisionModel

import timm_naflex_fast

NAMES = ("pixel_values", "pixel_attention_mask", "spatial_shapes")


class Tower(torch.nn.Module):
    """The pooled output alone, from the three inputs that transformers' processor makes."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pixel_values, pixel_attention_mask, spatial_shapes):
        """Images (B, N, 768) of random patches; which are real, (B, N); the grids (B, 2)."""
        return self.model(pixel_values, pixel_attention_mask, spatial_shapes).pooler_output


def batch(grids: list[tuple[int, int]], length: int) -> tuple[torch.Tensor, ...]:
    sizes = torch.tensor(grids)
    mask = (torch.arange(length) < sizes.prod(1, keepdim=True)).to(torch.int32)
    return torch.randn(len(grids), length, 768) * mask[..., None], mask, sizes


def main() -> None:
    torch.manual_seed(0)
    small = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    tower = Tower(
        Siglip2VisionModel(Siglip2VisionConfig(num_patches=256, patch_size=16, **small))
    ).eval()
    images, tokens = torch.export.Dim("images"), torch.export.Dim("tokens")
    with torch.no_grad(), timm_naflex_fast.enable(library="transformers"):
        free = ({0: images, 1: tokens}, {0: images, 1: tokens}, {0: images})
        program = torch.export.export(tower, batch([(4, 6), (7, 3)], 28), dynamic_shapes=free)
        print(f"who computed, and how often: {timm_naflex_fast.status().calls}")
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/siglip2.onnx"
        torch.onnx.export(program, dynamo=True, verbose=False).save(file)
        session = onnxruntime.InferenceSession(file)
        core = openvino.Core()
        compiled = core.compile_model(
            core.read_model(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
        )
    for what, grids, length in (
        ("padded", [(3, 20), (18, 2), (9, 9)], 90),
        ("full", [(6, 10), (20, 3)], 60),
    ):
        given = batch(grids, length)
        with torch.no_grad():
            want = tower(*given).numpy()
        named = {name: tensor.numpy() for name, tensor in zip(NAMES, given)}
        results = {"ONNX Runtime": session.run(None, named)[0], "OpenVINO": compiled(named)[0]}
        for runtime, got in results.items():
            difference = abs(got - want).max() / abs(want).max()
            print(f"{what}, {runtime}: largest difference {difference:.1e} of the largest output")
            assert difference <= 1e-4


if __name__ == "__main__":
    main()
