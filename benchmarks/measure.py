"""Measure what the pages show: a name is a result file in results/, without .json. Then: uv run
tools/pages.py.

uv run benchmarks/measure.py                          # all files but those of this code and this machine: it goes on
uv run benchmarks/measure.py speed/siglip counts      # these files again
uv run benchmarks/measure.py --tiny                   # does every command work? Tiny sizes, nothing is kept

Nothing else may run beside what is timed: on a busy machine it does
not start. What is counted may be counted at any time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import counts
import races
from tabulate import tabulate

from timm_naflex_fast.measure.output import provenance, write_json

ROOT = Path(__file__).resolve().parents[1]
FEW = "--contenders stock timm-flag-bilinear interpolate_cached grid_sample matmul plain-add"
SMALL = "--model vit_small_patch16_224 --workload siglip"
FOUR_BLOCKS = (
    "--model naflexvit_base_patch16_siglip --model-kwargs depth=4 embed_dim=192 num_heads=2"
)
SEEN = "single imagenet siglip diverse extreme radio"
FACTS = ("commit", "machine", "torch", "timm")
BUSY = 0.7  # processes that waited for a core or had one, over the last minute

# Options of `naflex-fast bench`. Ratios are only taken within one file, and no two files time the
# same thing.
BENCH = {
    "speed/siglip": "--workload siglip",
    "speed/diverse": "--workload diverse --budget 1",
    "speed/others": f"--workload single imagenet extreme {FEW} --budget 1",
    "speed/radio": f"--workload radio {FEW} --budget 1",
    "speed/small": f"--workload {SEEN} --batch-size 1 16 --phase infer train {FEW} --rounds 200 --budget 0.3",
    "speed/bfloat16": f"--workload siglip diverse --dtype bfloat16 --phase infer train {FEW} --budget 1",
    "model/small": f"{SMALL} diverse --batch-size 8 --rounds 10 --budget 60",
    "model/small_64": f"{SMALL} --batch-size 64 --rounds 10 --budget 600",  # a training step holds about 8 GB
    "model/base": "--model naflexvit_base_patch16_siglip --workload siglip --batch-size 8 --rounds 8 --budget 100",
    "compiled": f"{FOUR_BLOCKS} --compile --max-seq-len 64 128 196 256 --batch-size 8 --rounds 6",
}
# Functions that yield the rows of race after race; given True, tiny ones.
TIMED = (races.rope, races.patch_kernels, races.other_libraries, races.exported)
COUNTED = {"counts": counts.steps, "graphs": counts.graphs}
MADE_HERE = {"speed/unseen": races.unseen} | {race.__name__: race for race in TIMED} | COUNTED
NAMES = (*BENCH, *MADE_HERE)


def measure(name: str, tiny: bool) -> dict[str, Any]:
    """What a result file holds."""
    start, rows = time.monotonic(), []
    if name in BENCH:
        options = BENCH[name] + " --rounds 1 --budget 0.01 --batch-size 1 --channels 4" * tiny
        with tempfile.NamedTemporaryFile() as out:
            command = [
                sys.executable,
                "-m",
                "timm_naflex_fast",
                "bench",
                *options.split(),
                "--json",
                out.name,
            ]
            subprocess.run(command, check=True, cwd=ROOT)
            rows = json.load(out)["rows"]
    else:
        for race in MADE_HERE[name](tiny):
            shown = (
                {key: value for key, value in row.items() if not isinstance(value, dict)}
                for row in race
            )
            print(tabulate(shown, "keys", intfmt=","), flush=True)
            rows += race
    about = provenance(f"uv run benchmarks/measure.py {name}")
    return {**about, "seconds": round(time.monotonic() - start), "rows": rows}


def main() -> None:
    """Measure what the options name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (all that are old)"
    )
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    files = {name: ROOT / "results" / f"{name}.json" for name in options.names or NAMES}
    before = {
        name: json.loads(file.read_text()) if file.exists() else {} for name, file in files.items()
    }
    here = provenance(
        ""
    )  # a file is old if it was made on another machine, with other code or other releases
    old = [name for name in files if any(before[name].get(fact) != here[fact] for fact in FACTS)]
    todo = [*files] if options.names or options.tiny else old
    if not options.tiny and {*todo} - {*COUNTED} and (load := os.getloadavg()[0]) > BUSY:
        parser.error(f"something else is running (load {load:.1f}): wait until it has ended")
    for name in todo:
        print(f"== {name}", flush=True)
        record = measure(name, options.tiny)
        if not options.tiny:
            files[name].parent.mkdir(parents=True, exist_ok=True)
            write_json(files[name], record)


if __name__ == "__main__":
    main()
