"""The position embedding under both ways in which glibc can treat large blocks, in turns in one run.

uv run benchmarks/heap.py --json results/heap.json

By default glibc gives every block above 32 MiB back to the kernel when it is freed, and the next one is mapped anew:
the kernel clears it page by page at the first touch. timm's backward makes such blocks once per grid, so this is a
large part of its time. A kept heap (settings below, or jemalloc, or a GPU's allocator) does without.

Each setting has a process of its own, because malloc reads its settings at the start. This process tells the two
when to run, so that one is idle while the other is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from timm_naflex_fast.measure.bench.command import KEPT_HEAP
from timm_naflex_fast.measure.bench.race import BASELINE, PLAIN_ADD, Contender, Race, Row, print_race, run
from timm_naflex_fast.measure.bench.workloads import WORKLOADS
from timm_naflex_fast.measure.output import check_writable, write_json
from timm_naflex_fast.measure.provenance import provenance

HEAPS: dict[str, dict[str, str]] = {"default": {}, "kept": KEPT_HEAP}
CONTENDERS = (BASELINE, "timm-flag-bilinear", "matmul", PLAIN_ADD)


class Child:
    """A process with one setting of malloc, ready to run the contenders of one race by name."""

    def __init__(self, settings: dict[str, str], race: Sequence[Any]) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
        command = [sys.executable, __file__, "--child", json.dumps(race)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=clean | settings, stdin=pipe, stdout=pipe, text=True)
        self.facts = self._read()

    def seconds(self, contender: str) -> float:
        """Run a contender once there."""
        assert self._process.stdin is not None
        print(contender, file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process ended with status {self._process.wait()}; its message is above")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def child(workload: str, batch: int, phase: str, contenders: Sequence[str], channels: int) -> None:
    """Print the race's facts; then for each name on stdin run that contender and print the seconds it took."""
    import time

    from timm_naflex_fast.measure.bench.pos_embed import race as make

    on = ExitStack()  # the contenders' choices hold as long as it lives
    race = make(WORKLOADS[workload], batch, "float32", phase, contenders, on, channels=channels)
    by_name = {contender.name: contender for contender in race.contenders}
    ours = [contender.name for contender in race.contenders if contender.ours]
    print(json.dumps({"names": list(by_name), "ours": ours, "about": race.about}), flush=True)
    for line in sys.stdin:
        contender = by_name[line.strip()]
        argument = contender.prepare()
        start = time.perf_counter()
        contender.run(argument)
        print(time.perf_counter() - start, flush=True)


def race_both(race: Sequence[Any], rounds: int, budget: float) -> Iterator[list[Row]]:
    """The rows of each heap, in turns; ratios are taken within a heap."""
    workload, batch, phase, _, _ = race
    children = {heap: Child(settings, race) for heap, settings in HEAPS.items()}
    try:
        contenders = tuple(
            Contender(f"{name}, {heap}", lambda _, of=one, name=name: of.seconds(name), ours=name in one.facts["ours"])
            for heap, one in children.items()
            for name in one.facts["names"]
        )
        both = Race("pos_embed", workload, phase, batch, "float32", contenders)
        rows = {row.contender: row for row in run(both, rounds, budget=budget, timed=lambda work: work())}
    finally:
        for one in children.values():
            one.close()
    for heap, one in children.items():
        stock, plain = (rows.get(f"{name}, {heap}") for name in (BASELINE, PLAIN_ADD))
        yield [
            replace(
                row,
                contender=name,
                about={**one.facts["about"], "heap": heap},
                times_faster=stock and stock.median_ms / row.median_ms,
                times_plain_add=plain and row.median_ms / plain.median_ms,
            )
            for name in one.facts["names"]
            for row in [rows[f"{name}, {heap}"]]
        ]


def main() -> None:
    """Run every race under both heaps, print a table for each, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--batch", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--phase", nargs="+", default=["infer", "train"])
    parser.add_argument("--channels", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--budget", type=float, default=1.0, help="seconds per contender, at least 3 rounds")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(*options.child)
    check_writable(options.json)
    rows = []
    for workload in options.workload:
        for batch in options.batch:
            for phase in options.phase:
                race = workload, batch, phase, CONTENDERS, options.channels
                for found in race_both(race, options.rounds, options.budget):
                    print_race(f"{workload} {phase}, B={batch}, heap: {found[0].about['heap']}", found)
                    rows += found
    if options.json:
        command = shlex.join(["uv", "run", "benchmarks/heap.py", *sys.argv[1:]])
        about = {**provenance(command), "kept_heap": KEPT_HEAP}
        write_json(options.json, {**about, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
