"""Measure what the README and docs/ show: one command per result file.

uv run benchmarks/measure.py speed/siglip counts      # these result files again
uv run benchmarks/measure.py                          # all of them (an hour); then tools/update_readme.py
uv run benchmarks/measure.py --tiny                   # check that every command works: tiny sizes, nothing is kept
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FEW = "--contenders stock timm-flag-bilinear interpolate_cached grid_sample matmul plain-add"
OVER_BATCH = f"bench --workload diverse --batch 1 4 16 64 {FEW} --budget 0.7"
LARGE = "bench --workload diverse --batch 128 256 --contenders interpolate_cached matmul plain-add --budget 0.7"
SMALL, BASE = "bench --model vit_small_patch16_224", "bench --model naflexvit_base_patch16_siglip"

# Result file in results/, without .json: command. Ratios are only taken within one file.
COMMANDS = {
    "speed/siglip": "bench --workload siglip",
    "speed/diverse": "bench --workload diverse",
    "speed/others": f"bench --workload single imagenet extreme {FEW}",
    "speed/radio": f"bench --workload radio --phase infer frozen {FEW} --budget 1",
    "speed/radio_train": f"bench --workload radio --phase train {FEW} --budget 1",
    "speed/small": "bench --batch 1 16 --phase infer train --budget 0.4 "
    "--contenders stock interpolate_cached matmul plain-add",
    "speed/bfloat16": "bench --workload siglip diverse --dtype bfloat16 --phase infer train --budget 1 "
    "--contenders stock timm-flag-bilinear matmul plain-add",
    "speed/batches_train": f"{OVER_BATCH} --phase train",
    "speed/batches_infer": f"{OVER_BATCH} --phase infer",
    "speed/batches_train_large": f"{LARGE} --phase train",
    "speed/batches_infer_large": f"{LARGE} --phase infer",
    # A training step of 64 images holds about 8 GB (small, siglip), 16 (base, siglip), 30 (small, diverse).
    "model/small": f"{SMALL} --workload siglip diverse --batch 8 --budget 30",
    "model/small_64": f"{SMALL} --workload siglip --batch 64 --budget 60",
    "model/small_64_infer": f"{SMALL} --workload diverse --batch 64 --phase infer --budget 60",
    "model/base": f"{BASE} --workload siglip diverse --batch 8 --budget 60",
    "model/base_64": f"{BASE} --workload siglip --batch 64 --rounds 3",
    "model/base_64_infer": f"{BASE} --workload diverse --batch 64 --phase infer --rounds 3",
    "heap": "heap.py",
    "counts": "counts.py",
    "patch_kernels": "patch_kernels.py",
    "rope": "rope.py",
    "other_libraries": "other_libraries.py",
}
TINY = {
    "bench": "--rounds 1 --budget 0.01 --batch 1 2 --channels 4",
    "--model": "--rounds 1 --budget 0.01 --batch 1 --model vit_tiny_patch16_224",
    "heap.py": "--rounds 1 --budget 0.01 --batch 2 --channels 4",
    "counts.py": "--batch 2 --channels 32",
    "patch_kernels.py": "--rounds 1 --budget 0.01 --kernels 2",
    "rope.py": "--rounds 1 --budget 0.01 --batch 1",
    "other_libraries.py": "--rounds 1 --batch 1 --channels 8",
}


def measure(name: str, folder: Path, tiny: bool = False) -> None:
    """Run the command of one result file, which is written into ``folder``."""
    script, *options = COMMANDS[name].split()
    out = folder / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    start = ["-m", "timm_naflex_fast", "bench"] if script == "bench" else [f"benchmarks/{script}"]
    small = TINY["--model" if "--model" in options else script].split() if tiny else []
    path = out.relative_to(ROOT) if out.is_relative_to(ROOT) else out
    subprocess.run([sys.executable, *start, *options, *small, "--json", str(path)], check=True, cwd=ROOT)
    record = json.loads(out.read_text())
    out.write_text(json.dumps({"commit": commit(), **record}, indent=1) + "\n")


def commit() -> str:
    """The commit of this checkout, "+" after edits in the package."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout

    edited = git("status", "--porcelain", "timm_naflex_fast")
    return git("rev-parse", "--short", "HEAD").strip() + "+" * bool(edited)


def main() -> None:
    """Run the commands that the options name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(COMMANDS)} (all)")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in COMMANDS]
    if unknown:
        parser.error(f"{unknown[0]!r} is no result file; valid: {', '.join(COMMANDS)}")
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.names or COMMANDS:
            print(f"== {name}", flush=True)
            measure(name, Path(scratch) if options.tiny else ROOT / "results", options.tiny)


if __name__ == "__main__":
    main()
