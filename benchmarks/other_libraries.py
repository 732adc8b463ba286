"""transformers' Siglip2 embeddings (base: a 16 x 16 table, 768 channels, 256 tokens), patched and not.

uv run benchmarks/measure.py other_libraries      # into results/other_libraries.json

It stops if a mode's code did not run; the file has the calls of each. Errors are those of the position embeddings, the
largest against float64, relative to its largest value. Times are medians of interleaved rounds on grids met before:
without gradients, and forward and backward. Patches hold one value each, so that their projection costs little beside
the position embeddings.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import timm_naflex_fast
from timm_naflex_fast.measure.bench.workloads import WORKLOADS
from timm_naflex_fast.measure.provenance import provenance

ROOT = Path(__file__).resolve().parents[1]
MODES = ("stock", "interpolate_cached", "matmul")
TOKENS = 256


def embeddings(channels: int) -> dict[str, torch.nn.Module]:
    """Equal embeddings, each with its own mode."""
    import transformers
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    torch.manual_seed(0)
    first = Siglip2VisionEmbeddings(transformers.Siglip2VisionConfig(hidden_size=channels, num_patches=256))
    first.patch_embedding = torch.nn.Linear(1, channels)
    found = {mode: copy.deepcopy(first) for mode in MODES}
    for mode in MODES[1:]:
        timm_naflex_fast.enable(mode, model=found[mode])
    return found


def error(model: Any, sizes: list[tuple[int, int]], dtype: torch.dtype) -> float:
    """The largest error of a model's position embeddings."""
    model = copy.deepcopy(model).to(dtype)
    table = model.position_embedding.weight.detach().double().view(1, 16, 16, -1).permute(0, 3, 1, 2)
    exact = {size: F.interpolate(table, size, mode="bilinear", antialias=True)[0].flatten(1).t() for size in set(sizes)}
    with torch.no_grad():
        model.patch_embedding.weight.zero_()
        model.patch_embedding.bias.zero_()
        got = model(torch.zeros(len(sizes), TOKENS, 1, dtype=dtype), torch.tensor(sizes)).double()
    worst = max((got[i, : h * w] - exact[h, w]).abs().max().item() for i, (h, w) in enumerate(sizes))
    return worst / max(cells.abs().max().item() for cells in exact.values())


def once(model: Any, pixels: torch.Tensor, sizes: torch.Tensor, train: bool) -> float:
    """Milliseconds of one call."""
    start = time.perf_counter()
    with torch.set_grad_enabled(train):
        out = model(pixels, sizes)
        if train:
            model.zero_grad()
            out.backward(torch.ones_like(out))
    return (time.perf_counter() - start) * 1e3


def race(models: dict[str, Any], batch: int, train: bool, rounds: int) -> dict[str, float]:
    """Median milliseconds of each mode; every round has other grids, all of them met before, and another order."""
    seed = random.Random(batch)
    grids = WORKLOADS["siglip"].grids(64)
    pixels, found = torch.randn(batch, TOKENS, 1), {mode: [] for mode in models}
    for model in models.values():
        once(model, torch.randn(len(grids), TOKENS, 1), torch.tensor(grids), train=False)
        once(model, pixels, torch.tensor(grids[:batch]), train)
    for _ in range(rounds):
        sizes = torch.tensor(seed.sample(grids, batch))
        for mode in seed.sample(MODES, len(MODES)):
            found[mode].append(once(models[mode], pixels, sizes, train))
    return {mode: statistics.median(times) for mode, times in found.items()}


def render() -> str:
    """The tables of docs/other-libraries.md, from the result file."""
    path = ROOT / "results" / "other_libraries.json"
    if not path.exists():
        return "Not measured yet: `uv run benchmarks/measure.py other_libraries`."
    found = json.loads(path.read_text())
    lines = ["| largest error against float64 | transformers | `interpolate_cached` | `matmul` |", "| --- " * 4 + "|"]
    lines += [f"| {name} | {' | '.join(f'{row[m]:.1e}' for m in MODES)} |" for name, row in found["errors"].items()]
    lines += ["", "| ms | transformers | `interpolate_cached` | `matmul` | times faster |", "| --- " * 5 + "|"]
    lines += [
        f"| {name} | {' | '.join(f'{row[m]:.1f}' for m in MODES)} | {row['stock'] / row['matmul']:.1f} |"
        for name, row in found["milliseconds"].items()
    ]
    made = found["made"]
    about = f"{made['machine']}; torch {made['torch']}, transformers {made['transformers']}; {made['date']}"
    return "\n".join([*lines, "", f"{about}; `{made['command']}`."])


def main() -> None:
    """Measure what the options name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--channels", type=int, default=768)
    options = parser.parse_args()
    import transformers

    models = embeddings(options.channels)
    sizes = WORKLOADS["siglip"].grids(16)
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    errors = {name: {mode: error(models[mode], sizes, dtype) for mode in MODES} for name, dtype in dtypes.items()}
    times = {
        f"B={batch}, {'forward and backward' if train else 'no gradients'}": race(models, batch, train, options.rounds)
        for batch in options.batch
        for train in (False, True)
    }
    calls = {who: count for (_, who), count in timm_naflex_fast.status().calls.items()}
    if set(calls) != set(MODES) or timm_naflex_fast.status().fallbacks:
        raise SystemExit(f"not every mode ran: {calls}, {timm_naflex_fast.status().fallbacks}")
    command = f"uv run {shlex.join(['benchmarks/other_libraries.py', *sys.argv[1:]])}"
    made = {**provenance(command), "transformers": transformers.__version__}
    text = json.dumps({"errors": errors, "milliseconds": times, "calls": calls, "made": made}, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
