"""Measure what the pages show: a name is a result file in results/, without .json. Then: uv run tools/pages.py.

uv run benchmarks/measure.py speed/siglip counts      # these files again
uv run benchmarks/measure.py                          # all of them (an hour)
uv run benchmarks/measure.py --tiny                   # does every command work? Tiny sizes, nothing is kept
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import counts
import graphs
import races

from timm_naflex_fast.measure.output import provenance, write_json

ROOT = Path(__file__).resolve().parents[1]
FEW = "--contenders stock timm-flag-bilinear interpolate_cached grid_sample matmul plain-add"
SMALL, BASE = "--model vit_small_patch16_224", "--model naflexvit_base_patch16_siglip"
# Read by glibc as a process starts: nothing is given back to the kernel. By default a freed block above 32 MiB is, and
# the next one is cleared page by page; timm's backward makes such blocks once per grid.
KEPT_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(64 * 2**20)}
HEAP = "--contenders stock timm-flag-bilinear matmul plain-add --phase infer train --batch 8 64 --budget 1"

# Options of `naflex-fast bench`. Ratios are only taken within one file.
BENCH = {
    "speed/siglip": "--workload siglip",
    "speed/diverse": "--workload diverse",
    "speed/others": f"--workload single imagenet extreme {FEW}",
    "speed/radio": f"--workload radio --phase infer frozen {FEW} --budget 1",
    "speed/radio_train": f"--workload radio --phase train {FEW} --budget 1",
    "speed/small": f"--batch 1 16 --phase infer train --budget 0.4 {FEW}",
    "speed/bfloat16": f"--workload siglip diverse --dtype bfloat16 --phase infer train --budget 1 {FEW}",
    "heap/default": HEAP,
    "heap/kept": HEAP,
    # A training step of 64 images holds about 8 GB (small, siglip), 16 (base, siglip), 30 (small, diverse).
    "model/small": f"{SMALL} --workload siglip diverse --batch 8 --budget 30",
    "model/small_64": f"{SMALL} --workload siglip --batch 64 --budget 60",
    "model/small_64_infer": f"{SMALL} --workload diverse --batch 64 --phase infer --budget 60",
    "model/base": f"{BASE} --workload siglip diverse --batch 8 --budget 60",
    "model/base_64": f"{BASE} --workload siglip --batch 64 --rounds 3",
    "model/base_64_infer": f"{BASE} --workload diverse --batch 64 --phase infer --rounds 3",
}
# Functions that yield the rows of race after race; given True, tiny ones.
MADE_HERE: dict[str, Callable[[bool], Iterator[list[dict[str, Any]]]]] = {
    "rope": races.rope,
    "patch_kernels": races.patch_kernels,
    "other_libraries": races.other_libraries,
    "counts": counts.rows,
    "graphs": graphs.rows,
}
NAMES = (*BENCH, *MADE_HERE)


def bench(options: str, tiny: bool, settings: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of `naflex-fast bench`, run with these settings of malloc."""
    if tiny:
        options += " --rounds 1 --budget 0.01 --batch 1 --channels 4 --workload siglip"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        command = [sys.executable, "-m", "timm_naflex_fast", "bench", *options.split(), "--json", str(out)]
        subprocess.run(command, check=True, cwd=ROOT, env=clean | settings)
        return json.loads(out.read_text())["rows"]


def measure(name: str, out: Path, tiny: bool) -> None:
    """Make one result file."""
    if name in MADE_HERE:
        rows = [row for race in MADE_HERE[name](tiny) for row in race]
    else:
        rows = bench(BENCH[name], tiny, KEPT_HEAP if name == "heap/kept" else {})
    write_json(out, {**provenance(f"uv run benchmarks/measure.py {name}"), "rows": rows})


def main() -> None:
    """Measure what the options name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (all)")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in NAMES]:
        parser.error(f"{unknown[0]!r} is no result file; valid: {', '.join(NAMES)}")
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.names or NAMES:
            print(f"== {name}", flush=True)
            out = (Path(scratch) if options.tiny else ROOT / "results") / f"{name}.json"
            out.parent.mkdir(parents=True, exist_ok=True)
            measure(name, out, options.tiny)


if __name__ == "__main__":
    main()
