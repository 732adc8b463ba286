"""Measure what the pages show: a name is a result file in lab/results/, without .json. Then: uv run
lab/tools/pages.py.

uv run lab/benchmarks/measure.py                          # everything, about an hour
uv run lab/benchmarks/measure.py speed/siglip counts      # these files
uv run --with executorch==1.5.1 lab/benchmarks/measure.py executorch

Nothing else may run beside it: on a busy machine it does not start.
"""

import argparse
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

from tabulate import tabulate

from lab.benchmarks import calls, counts, mobile, pos_embed, races, whole_models
from timm_naflex_fast.commands.measure.output import provenance, to_json

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
    counts.counts,
    counts.graphs,
    counts.rounding,
    mobile.executorch,
):
    MEASURED[function.__name__] = function


def measure(name: str) -> dict[str, Any]:
    """What a result file holds; each race is printed when it has ended."""
    start = time.monotonic()
    found = []
    for race in MEASURED[name]():
        shown = []
        for row in race:
            shown.append({key: value for key, value in row.items() if not isinstance(value, dict)})
        print(tabulate(shown, "keys", intfmt=","), flush=True)
        found += race
    about = provenance(f"uv run lab/benchmarks/measure.py {name}")
    return {**about, "seconds": round(time.monotonic() - start), "rows": found}


def main() -> None:
    """Measure what the options name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    help = f"of {', '.join(MEASURED)} (all)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=help, default=[*MEASURED])
    options = parser.parse_args()
    load = os.getloadavg()[0]
    if load > BUSY:
        parser.error(f"something else is running (load {load:.1f}): wait until it has ended")
    for name in options.names:
        print(f"== {name}", flush=True)
        record = measure(name)
        file = RESULTS / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(to_json(record), encoding="utf-8")


if __name__ == "__main__":
    main()
