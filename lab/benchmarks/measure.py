"""Measure what the pages show: a name is a result file in results/, without .json. Then: uv run
lab/tools/pages.py.

uv run lab/benchmarks/measure.py                          # all files but those of this code and this machine: it goes on
uv run lab/benchmarks/measure.py speed/siglip counts      # these files again
uv run lab/benchmarks/measure.py --tiny                   # does every command work? Tiny sizes, nothing is kept

Nothing else may run beside what is timed: on a busy machine it does
not start. What is counted may be counted at any time.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import counts
import pos_embed
import races
import whole_models
from tabulate import tabulate

from timm_naflex_fast.commands.measure.output import provenance, to_json

ROOT = Path(__file__).resolve().parents[2]
FACTS = ("code_last_changed_in", "machine", "torch", "timm")
BUSY = 0.7  # processes that waited for a core or had one, over the last minute

SMALL = "vit_small_patch16_224"
BASE = "naflexvit_base_patch16_siglip"
# Options of ``whole_models.races``.
MODELS: dict[str, dict[str, Any]] = {
    "model/small": dict(model=SMALL, names=["siglip", "diverse"], batch=8, rounds=10, budget=60),
    "model/small_64": dict(  # a training step holds about 8 GB
        model=SMALL, names=["siglip"], batch=64, rounds=10, budget=600
    ),
    "model/base": dict(model=BASE, names=["siglip"], batch=8, rounds=8, budget=100),
}
# Options of ``pos_embed.races``.
POS_EMBED: dict[str, dict[str, Any]] = {
    "speed/siglip": dict(names=["siglip"], budget=2.0),
    "speed/diverse": dict(names=["diverse"]),
    "speed/others": dict(names=["single", "imagenet", "extreme"], contenders=pos_embed.FEW),
    "speed/radio": dict(names=["radio"], contenders=pos_embed.FEW),
    "speed/small": dict(
        names=[*pos_embed.WORKLOADS],
        contenders=pos_embed.FEW,
        batches=[1, 16],
        phases=["infer", "train"],
        rounds=200,
        budget=0.3,
    ),
    "speed/bfloat16": dict(
        names=["siglip", "diverse"],
        contenders=pos_embed.FEW,
        dtypes=["bfloat16"],
        phases=["infer", "train"],
    ),
}
COUNTED = {"counts": counts.steps, "graphs": counts.graphs, "rounding": counts.rounding}
# Functions that yield the rows of race after race; given True, tiny ones.
MADE_HERE: dict[str, Any] = {
    name: partial(whole_models.races, **options) for name, options in MODELS.items()
}
MADE_HERE |= {name: partial(pos_embed.races, **options) for name, options in POS_EMBED.items()}
MADE_HERE["speed/unseen"] = pos_embed.unseen
for race in (
    whole_models.compiled,
    races.rope,
    races.patch_kernels,
    races.other_libraries,
    races.exported,
):
    MADE_HERE[race.__name__] = race
MADE_HERE |= COUNTED


def measure(name: str, tiny: bool) -> dict[str, Any]:
    """What a result file holds."""
    start = time.monotonic()
    rows = _rows(name, tiny)
    about = provenance(f"uv run lab/benchmarks/measure.py {name}")
    return {**about, "seconds": round(time.monotonic() - start), "rows": rows}


def _rows(name: str, tiny: bool) -> list[Any]:
    """The rows of race after race, each printed when it has ended."""
    rows = []
    for race in MADE_HERE[name](tiny):
        shown = []
        for row in race:
            shown.append({key: value for key, value in row.items() if not isinstance(value, dict)})
        print(tabulate(shown, "keys", intfmt=","), flush=True)
        rows += race
    return rows


def main() -> None:
    """Measure what the options name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(MADE_HERE)} (all that are old)"
    )
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    todo = options.names or _todo(options.tiny)
    is_timed = not COUNTED.keys() >= {*todo}
    if is_timed and not options.tiny:
        load = os.getloadavg()[0]
        if load > BUSY:
            parser.error(f"something else is running (load {load:.1f}): wait until it has ended")
    for name in todo:
        print(f"== {name}", flush=True)
        record = measure(name, options.tiny)
        if not options.tiny:
            file = _result_file(name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(to_json(record), encoding="utf-8")


def _todo(tiny: bool) -> Sequence[str]:
    """What is measured where nothing is named: all that is old; ``tiny``: all."""
    if tiny:
        return [*MADE_HERE]
    here = provenance("")
    return [name for name in MADE_HERE if _is_old(name, here)]


def _result_file(name: str) -> Path:
    return ROOT / "lab" / "results" / f"{name}.json"


def _is_old(name: str, here: dict[str, Any]) -> bool:
    """Whether a result was made on another machine, with other code, with other releases, or not
    yet."""
    file = _result_file(name)
    if not file.exists():
        return True
    before = json.loads(file.read_text())
    return any(before.get(fact) != here.get(fact) for fact in FACTS)


if __name__ == "__main__":
    main()
