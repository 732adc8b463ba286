"""``naflex-fast bench``: its options, and the way from races to tables and files.

Nothing heavy is imported until the command runs, so ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from ..contenders import BASELINE, NAMES, OURS, PLAIN_ADD, present_name
from ..output import check_writable, positive, write_json
from .workloads import WORKLOADS, Workload, folder_workload, read_sizes, siglip_grids

if TYPE_CHECKING:
    from .race import Race, Row

# Read by glibc as a process starts: no block is mapped by itself, and nothing is given back to the kernel.
KEPT_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(64 * 2**20)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add, some = parser.add_argument, dict[str, Any](nargs="+", metavar="NAME")
    dtypes, phases, contenders = ("float32", "bfloat16", "float16"), ("infer", "frozen", "train"), (*NAMES, PLAIN_ADD)
    shapes = parser.add_mutually_exclusive_group().add_argument
    shapes("--workload", **some, choices=WORKLOADS, help=f"of {' '.join(WORKLOADS)} (all; a model: siglip)")
    shapes("--sizes-from", metavar="DIR", help="grids of a folder's images; only their headers are read")
    add("--max-seq-len", "--seq-len", type=positive, metavar="N", help="most patches per image, no workload's (256)")
    add("--batch", dest="batches", nargs="+", type=positive, metavar="B", help="batch sizes (64; a model: 8)")
    add("--dtype", dest="dtypes", **some, choices=dtypes, help="of the tokens (float32; a model on a GPU: bfloat16)")
    add("--phase", dest="phases", **some, choices=phases, help=f"of {' '.join(phases)} (all)")
    add(
        "--contenders",
        **some,
        type=present_name,
        choices=contenders,
        help=f"of {' '.join(contenders)} (all; a model: stock matmul)",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where (cpu)")
    add("--channels", type=positive, default=768, metavar="C", help="width of the tokens (768; a model has its own)")
    add("--rounds", type=positive, default=30, metavar="R", help="timed rounds, at most (30)")
    add("--budget", type=float, default=2.0, metavar="S", help="seconds per contender and race, at least 3 rounds (2)")
    add("--keep-heap", action="store_true", help="let glibc keep freed memory: bench starts itself again with that set")
    add("--model", metavar="NAME", help="a whole timm NaFlexVit: a training step and an inference, stock and ours")
    add("--json", metavar="FILE", help="also write the figures there")


def bench(options: argparse.Namespace) -> int:
    """Run the races that ``options`` name; print, and write what was asked for.

    Raises:
        ValueError: options that do not go together, with what is valid; before anything is timed.
        OSError: ``--json`` cannot be written; before anything is timed.
    """
    check_writable(options.json)
    if options.keep_heap and any(os.environ.get(name) != value for name, value in KEPT_HEAP.items()):
        command = [sys.executable, "-m", "timm_naflex_fast", *options.arguments]
        return subprocess.run(command, env=os.environ | KEPT_HEAP).returncode
    from ..provenance import provenance
    from .model import conclude

    rows = [row for race in _races(options) for row in race]
    if options.json:
        write_json(options.json, {**provenance(options.command), "rows": [asdict(row) for row in rows]})
        print(f"written: {options.json}")
    if options.model:
        print("\n".join(conclude(rows)))
    return 0 if rows else 2


def _races(options: argparse.Namespace) -> Iterator[list[Row]]:
    """Make and run one race after the other; yield the rows of each."""
    import torch

    from ..models import load_model
    from . import model, pos_embed
    from .race import print_race, run

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch sees no GPU here; valid: --device cpu")
    if options.max_seq_len and options.workload:
        raise ValueError("a workload has its own lengths; leave out --workload or --max-seq-len")
    choices = model.CHOICES if options.model else pos_embed.CHOICES
    chosen = {name: getattr(options, name) or default for name, default in choices.items()}
    make: Callable[..., Race] = partial(pos_embed.race, device=options.device, channels=options.channels)
    patch_size = 16
    if options.model:
        valid = (*choices["phases"], BASELINE, *OURS)
        if wrong := {*chosen["phases"], *chosen["contenders"]} - {*valid}:
            raise ValueError(f"{' '.join(wrong)} cannot be timed in a whole model; valid: {' '.join(valid)}")
        if options.device == "cuda" and not options.dtypes:
            chosen["dtypes"] = ["bfloat16"]
        made, _ = load_model(options.model, random_weights=True, num_classes=model.CLASSES)
        make, patch_size = partial(model.race, made.to(options.device)), made.embeds.patch_size[0]
    ways = product(chosen["dtypes"], chosen["phases"], sorted(set(chosen["batches"])))
    for workload, (dtype, phase, batch) in product(_workloads(options, patch_size), ways):
        if not options.model and (why := workload.missing()):
            print(f"not run: workload {workload.name}, {why}")
            continue
        with ExitStack() as on:
            race = make(workload, batch, dtype, phase, chosen["contenders"], on)
            rows = run(race, options.rounds, device=options.device, budget=options.budget)
        print_race(race.title, rows)
        for name, why in race.about.get("left_out", {}).items():
            print(f"not run: {name}, {why}")
        yield rows


def _workloads(options: argparse.Namespace, patch_size: int) -> list[Workload]:
    most, siglip = options.max_seq_len or 256, WORKLOADS["siglip"]
    if options.sizes_from:
        grids, unreadable = read_sizes(options.sizes_from, most, patch_size)
        for line in unreadable:
            print(f"not read: {line}")
        print(f"{len(grids):,} images, {len(set(grids)):,} distinct grids of at most {most} tokens\n")
        return [folder_workload(options.sizes_from, grids, siglip)]
    if options.max_seq_len:
        return [replace(siglip, name=f"siglip-{most}", draw=siglip_grids(most))]
    return [WORKLOADS[name] for name in options.workload or (["siglip"] if options.model else WORKLOADS)]
