"""The rotary tables: timm's ``NaFlexVit._generate_rope_naflex`` alone, on grids h, w uniform in 4..31.

uv run benchmarks/rope.py --json results/rope.json

| phase | what is timed |
| --- | --- |
| infer | making the tables; mixed ones block by block, each dropped before the next |
| train | mixed ones alone: all blocks' tables, and the gradient of the frequencies from theirs |

The plain add writes tables of the same size once and, in training, reads each one's gradient once.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from timm_naflex_fast.measure.bench.race import BASELINE, PLAIN_ADD, Contender, Race, print_race, run
from timm_naflex_fast.measure.bench.workloads import WORKLOADS, coordinates
from timm_naflex_fast.measure.output import check_writable, write_json
from timm_naflex_fast.measure.provenance import provenance
from timm_naflex_fast.patching.install import enable

TYPES: dict[str, dict[str, Any]] = {
    "axial": {},
    "dinov3": dict(rope_temperature=100.0, rope_rotate_half=True),
    "mrope": dict(rope_mrope_section=(8, 12, 12)),
    "mixed": dict(rope_temperature=10.0, rope_grid_indexing="xy"),
}
CONTENDERS = (PLAIN_ADD, BASELINE, "batched")
HEADS, HEAD_DIM, DEPTH = 6, 64, 2


def race(kind: str, batch: int, phase: str, names: Sequence[str], on: ExitStack) -> Race:
    """The race of one rotary type; the models' choices hold as long as ``on``."""
    grids = list(islice(WORKLOADS["diverse"].draw(random.Random(0)), batch))
    coord = coordinates(grids)
    x = torch.zeros(()).expand(*coord.shape[:2], HEADS * HEAD_DIM)  # only its shape and dtype count
    blocks, heads = (DEPTH, HEADS) if kind == "mixed" else (1, 1)
    shape = (batch, heads, coord.shape[1], 2 * HEAD_DIM)
    g = torch.randn(shape) if phase == "train" else None
    made = []
    for name in names:
        if name == PLAIN_ADD:
            made.append(_plain_add(shape, blocks, g))
            continue
        model = _model(kind)
        if name != BASELINE:
            on.enter_context(enable("stock", rope=name, model=model))
        made.append(_contender(name, model, x, coord, g))
    about = dict(
        tokens=sum(h * w for h, w in grids),
        length=coord.shape[1],
        grids=len(set(grids)),
        heads=HEADS,
        head_dim=HEAD_DIM,
        blocks=blocks,
        x_bytes=4 * torch.Size(shape).numel(),
    )
    return Race("rope", kind, phase, batch, "float32", tuple(made), about)


def _model(kind: str) -> Any:
    from timm.models.naflexvit import NaFlexVit, NaFlexVitCfg

    settings: dict[str, Any] = dict(embed_dim=HEADS * HEAD_DIM, depth=DEPTH, num_heads=HEADS, mlp_ratio=0.1)
    cfg = NaFlexVitCfg(
        **settings, patch_size=1, pos_embed="none", class_token=False, reg_tokens=0, rope_type=kind, **TYPES[kind]
    )
    return NaFlexVit(cfg, in_chans=1, num_classes=0)


def _contender(name: str, model: Any, x: Tensor, coord: Tensor, g: Tensor | None) -> Contender:
    def infer(_: None) -> None:
        with torch.no_grad():
            tables = model._generate_rope_naflex(x, coord)
            for table in [tables] if isinstance(tables, Tensor) else tables:
                del table

    def train(_: None) -> None:
        model.rope.freqs.grad = None
        tables = list(model._generate_rope_naflex(x, coord))
        torch.autograd.backward(tables, [g] * len(tables))

    return Contender(name, infer if g is None else train, ours=name != BASELINE)


def _plain_add(shape: tuple[int, ...], blocks: int, g: Tensor | None) -> Contender:
    def touch(_: None) -> None:
        kept = []
        for _block in range(blocks):
            table = torch.zeros(shape)
            if g is not None:
                kept.append(table)
                g.sum((0, 2))

    return Contender(PLAIN_ADD, touch)


def peak_memory(contender: Contender) -> int | None:
    """Run a contender once on the CPU and return the most bytes that it held at once; None where not known.

    The profiler records every allocation and release, also inside operators, and their running sum has a maximum.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints between the tables
    from torch.profiler import ProfilerActivity, profile

    argument = contender.prepare()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        contender.run(argument)
    try:
        events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    except AttributeError:  # a private interface, which another torch may not have
        return None
    return max(accumulate(changes), default=0)


def main() -> None:
    """Run every race, print its table, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 128, 256])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--budget", type=float, default=0.7, help="seconds per contender and race, at least 3 rounds")
    parser.add_argument("--patience", type=float, default=10.0, help="seconds; who takes longer skips larger batches")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    check_writable(options.json)
    rows = []
    for kind in options.type:
        for phase in ("infer", "train") if kind == "mixed" else ("infer",):
            names = list(CONTENDERS)
            for batch in sorted(options.batch):
                with ExitStack() as on:
                    made = race(kind, batch, phase, names, on)
                    found = run(made, options.rounds, budget=options.budget)
                    peaks = {one.name: peak_memory(one) for one in made.contenders}
                found = [replace(row, peak_bytes=peaks[row.contender]) for row in found]
                print_race(made.title, found)
                rows += found
                names = [row.contender for row in found if row.median_ms <= 1e3 * options.patience]
    if options.json:
        command = shlex.join(["uv", "run", "benchmarks/rope.py", *sys.argv[1:]])
        write_json(options.json, {**provenance(command), "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
