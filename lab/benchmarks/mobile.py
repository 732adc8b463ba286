"""How far an exported program is from timm in ExecuTorch, which is no dependency of the project:

uv run --with executorch==1.5.1 lab/benchmarks/mobile.py

Writes lab/results/executorch.json.
"""

import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from lab.benchmarks.counts import make
from lab.benchmarks.measure import RESULTS
from lab.benchmarks.pos_embed import Row
from timm_naflex_fast import enable
from timm_naflex_fast.commands.measure import export
from timm_naflex_fast.commands.measure.bench.model import random_batch
from timm_naflex_fast.commands.measure.output import provenance, to_json, written_whole

# ExecuTorch plans memory for the largest sizes, and 4,096 images of 65,536 tokens need too much.
FREE = {0: torch.export.Dim("images", max=8), 1: torch.export.Dim("tokens", min=2, max=256)}
# The first is exported, and the program is compared on the others.
BATCHES = (
    *export.BATCHES,
    [(16, 16), (2, 40)],
    [(8, 8), (30, 3), (5, 11), (16, 12), (1, 100)],
)


def differences() -> Iterator[Row]:
    """A row for each kind of kernels and part of a small model with random weights: how far
    ExecuTorch is off, relative to the largest number of timm's eager code, in float32.
    """
    torch.manual_seed(0)
    model = make("timm", sampled=False)
    example, *unseen = [random_batch(model, grids) for grids in BATCHES]
    parts = {"model": model, "embeddings": export.position_embeddings(model)}
    for part, exported in parts.items():
        module = export.Naflex(exported).eval()
        with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
            wanted = [module(**inputs) for inputs in unseen]
            with enable("matmul", model=module, strict=True):
                free = dict.fromkeys(example, FREE)
                program = export.write(module, example, free, Path(folder, "model.pt2"))
            for kernels in ("portable", "XNNPACK"):
                run = load(program, kernels, Path(folder, f"{kernels}.pte"))
                off = export.largest_difference(run, unseen, wanted)
                yield {"part": part, "kernels": kernels, "off": off}


def load(program: Any, kernels: str, file: Path) -> export.Run:
    """A function that runs an exported program in ExecuTorch, which reads it from ``file``."""
    from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    partitioners = []
    if kernels == "XNNPACK":
        # It takes operators that add an axis, and then refuses them where two sizes are free.
        configs = [c for c in ALL_PARTITIONER_CONFIGS if c.__name__ != "UnsqueezeCopyConfig"]
        partitioners.append(XnnpackPartitioner(configs))
    lowered = to_edge_transform_and_lower(program, partitioner=partitioners)
    lowered.to_executorch().save(str(file))
    method = Runtime.get().load_program(file).load_method("forward")
    return lambda inputs: method.execute([*inputs.values()])[0]


def main() -> None:
    """Measure, and write the result file."""
    rows = list(differences())
    record = provenance("uv run --with executorch==1.5.1 lab/benchmarks/mobile.py")
    record |= {"executorch": version("executorch"), "weights": "random", "rows": rows}
    with written_whole(RESULTS / "executorch.json") as file:
        file.write_text(to_json(record), encoding="utf-8")


if __name__ == "__main__":
    main()
