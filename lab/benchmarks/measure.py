"""Measure what the pages show: a name is a result file in lab/results/, without .json. Then: uv run
lab/tools/pages.py.

uv run lab/benchmarks/measure.py                          # everything, half an hour
uv run lab/benchmarks/measure.py speed/siglip counts      # these files

Each file is written when its figures are there. Nothing else may run beside it: on a busy machine
it does not start.
"""

import argparse
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from tabulate import tabulate

from lab.benchmarks import calls, counts, pos_embed, races, whole_models
from timm_naflex_fast.commands.measure.output import provenance, to_json, written_whole

RESULTS = Path(__file__).resolve().parents[1] / "results"
BUSY = 0.7  # processes that waited for a core or had one, over the last minute

SMALL = "vit_small_patch16_224"
BASE = "naflexvit_base_patch16_siglip"
# Functions that yield the rows of race after race.
MEASURED: dict[str, Any] = {
    "model/small": partial(whole_models.races, SMALL, ["siglip", "diverse"]),
    "model/base": partial(whole_models.races, BASE, ["siglip"]),
}
for name in pos_embed.SHOWN:
    MEASURED[f"speed/{name}"] = partial(pos_embed.races, name=name)
for function in (
    calls.calls,
    calls.way,
    calls.startup,
    whole_models.compiled,
    races.rope,
    races.patch_kernels,
    races.other_libraries,
    races.rounding,
    counts.counts,
    counts.graphs,
):
    MEASURED[function.__name__] = function


def measure(name: str) -> dict[str, Any]:
    """What a result file holds; each race is printed when it has ended."""
    start = time.monotonic()
    found = []
    for race in MEASURED[name]():
        print(tabulate(race, "keys", intfmt=","), flush=True)
        found += race
    about = provenance(f"uv run lab/benchmarks/measure.py {name}")
    return {**about, "seconds": round(time.monotonic() - start), "rows": found}


def main() -> None:
    """Measure what the options name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=["all", *MEASURED], default="all")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    if load > BUSY:
        parser.error(f"something else is running (load {load:.1f}): wait until it has ended")
    for name in MEASURED if options.names == "all" else options.names:
        print(f"== {name}", flush=True)
        record = measure(name)
        with written_whole(RESULTS / f"{name}.json") as file:
            file.write_text(to_json(record), encoding="utf-8")


if __name__ == "__main__":
    main()
