"""How far each strategy moves a SigLIP-2 tower: embeddings, every block, pooled output. A command for a child process.

python siglip2_drift.py MODEL DIR FILE.json [--stand-in] [--max-seq-len N]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import timm
import torch
from oracles import is_pristine
from torch import Tensor, nn

import timm_naflex_fast
from timm_naflex_fast.measure.images import NaFlexImages, image_sources
from timm_naflex_fast.measure.models import load_model
from timm_naflex_fast.patching.settings import MODES

EXACT = ("interpolate_cached", "matmul")


def stages(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Embeddings and every block's output at the valid tokens (T, C), and the pooled output (B, D)."""
    valid, caught = inputs["patch_valid"], []
    hook = model.embeds.register_forward_hook(lambda _, __, out: caught.append(out[0] if type(out) is tuple else out))
    try:
        final, blocks = model.forward_intermediates(
            inputs["patches"], patch_coord=inputs["patch_coord"], patch_valid=valid, output_fmt="NLC"
        )
    finally:
        hook.remove()
    found = {"embeddings": caught[0][:, -valid.shape[1] :][valid]}
    found |= {f"block {i}": block[valid] for i, block in enumerate(blocks)}
    return found | {"pooled": model.forward_head(final, patch_valid=valid, pre_logits=True)}


def distance(ours: Tensor, timms: Tensor) -> dict[str, float]:
    """Largest absolute difference, root mean square relative to timm's, mean cosine distance of the rows."""
    a, b = ours.double(), timms.double()
    unit = [nn.functional.normalize(x, dim=-1) for x in (a, b)]
    return {
        "max_abs": (a - b).abs().max().item(),
        "rel_rms": ((a - b).square().mean() / b.square().mean()).sqrt().item(),
        "cosine_distance": ((unit[0] - unit[1]).square().sum(-1) / 2).mean().item(),
    }


@torch.inference_mode()
def drift(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, dict[str, dict[str, float]]]:
    """Per strategy and stage, the distance from timm as it came."""
    assert is_pristine()
    timms = stages(model, inputs)
    results = {}
    for strategy in MODES:
        with timm_naflex_fast.enable(mode=strategy, model=model):
            ours = stages(model, inputs)
        results[strategy] = {name: distance(ours[name], timms[name]) for name in timms}
    return results


def check(results: dict[str, Any], table_size: float) -> None:
    """Assert what exact means: ``table_size`` is the largest absolute value of the position table.

    The tolerance of the resampled table holds for the embeddings too, but for the rounding of their own sum.
    """
    assert all(d == 0 for d in results["stock"]["pooled"].values()), "the model does not repeat itself"
    for name, how in results["interpolate_cached"].items():
        assert how["max_abs"] == 0, f"interpolate_cached, {name}: {how}"
    first = results["matmul"]["embeddings"]
    assert first["max_abs"] <= 4e-6 * max(1.0, table_size), f"matmul, embeddings: {first}"
    for name, how in results["matmul"].items():
        assert how["rel_rms"] <= 2e-5 and how["cosine_distance"] <= 1e-9, f"matmul, {name}: {how}"


def measure(name: str, folder: str | Path, weights: str | Path | None, max_seq_len: int) -> dict[str, Any]:
    """Load the model through timm's factory, measure on a folder's images, and check the exact strategies."""
    model, words = load_model(name, weights)
    inputs, _ = next(iter(NaFlexImages(image_sources(folder), model, max_seq_len, batch_size=64)))
    results = drift(model, inputs)
    table = model.embeds.pos_embed.detach()
    check(results, table.abs().max().item())
    return {
        "model": name,
        "weights": words,
        "parameters": sum(p.numel() for p in model.parameters()),
        "table": list(table.shape),
        "images": len(inputs["patches"]),
        "grids": sorted({tuple(coord.amax(0).add(1).tolist()) for coord in inputs["patch_coord"]}),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "strategies": results,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--stand-in", action="store_true", help="label the weights so")
    parser.add_argument("--max-seq-len", type=int, default=256)
    options = parser.parse_args()
    record = measure(options.model, options.folder, None, options.max_seq_len)
    if options.stand_in:
        record["weights"] = "stand-in of random numbers; says nothing about SigLIP-2"
    options.out.write_text(json.dumps(record, indent=1) + "\n")
