"""``naflex-fast bench``: its options, and the way from races to tables and files.

Nothing heavy is imported until the command runs, so ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from ..measure.bench.workloads import WORKLOADS, Workload, folder_workload, read_sizes, siglip_grids
from ..measure.contenders import BASELINE, NAMES, PLAIN_ADD
from ..measure.models import DTYPES, add_model_arguments, load_model
from ..measure.output import check_writable, path, positive, printable, progress, provenance, seconds, write_json
from ..names import STRATEGY_NAMES

if TYPE_CHECKING:
    from ..measure.bench.race import Race

SLOW = 2.0  # a frozen table that takes so many times the time of a changing one was disturbed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add, some = parser.add_argument, dict[str, Any](nargs="+", metavar="NAME")
    phases, contenders = ("infer", "frozen", "train"), (*NAMES, PLAIN_ADD)
    shapes = parser.add_mutually_exclusive_group().add_argument
    shapes("--workload", **some, choices=WORKLOADS, help=f"of {' '.join(WORKLOADS)} (all; a model: siglip)")
    shapes("--sizes-from", type=path, metavar="DIR", help="grids of a folder's images; only their headers are read")
    add("--max-seq-len", type=positive, metavar="N", help="most patches per image, no workload's (256)")
    add("--batch", dest="batches", nargs="+", type=positive, metavar="B", help="batch sizes (64; a model: 8)")
    add("--dtype", dest="dtypes", **some, choices=DTYPES, help="of the tokens (float32; a model on a GPU: bfloat16)")
    add("--phase", dest="phases", **some, choices=phases, help=f"of {' '.join(phases)} (all)")
    whole = f"of {' '.join(contenders)} (all; a model: stock matmul)"
    add("--contenders", **some, choices=contenders, help=whole)
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where (cpu)")
    add("--channels", type=positive, default=768, metavar="C", help="width of the tokens (768; a model has its own)")
    add("--rounds", type=positive, default=30, metavar="R", help="timed rounds, at most (30)")
    add("--budget", type=seconds, default=2.0, metavar="S", help="seconds per contender and race, but 3 rounds (2)")
    add_model_arguments(parser)
    add("--json", type=path, metavar="FILE", help="also write the figures there, after each race")


def bench(options: argparse.Namespace) -> int:
    """Run the races that ``options`` name; print, and write what was asked for.

    Raises:
        ValueError: options that do not go together, with what is valid; before anything is timed.
        OSError: ``--json`` cannot be written; before anything is timed.
    """
    from ..measure.bench.race import print_race

    check_writable(options.json)
    rows: list[dict[str, Any]] = []
    for race, found in _races(options):
        rows += found
        if options.json:  # whatever stops the next race, these are kept
            write_json(options.json, {**provenance(options.command), "rows": rows})
        print_race(race.title, found)
        for name, why in race.about.get("left_out", {}).items():
            print(f"not run: {name}, {why}")
    if options.json and rows:
        print(f"written: {printable(options.json)}")
    if not options.model:
        print("In a model the position embedding is a small part of a step: bench --model NAME times a whole one.")
    return 0 if rows else 2


def _races(options: argparse.Namespace) -> Iterator[tuple[Race, list[dict[str, Any]]]]:
    """Make and run one race after the other; yield each with its rows."""
    import torch

    from ..measure.bench import model, pos_embed
    from ..measure.bench.race import run

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch sees no GPU here; valid: --device cpu")
    if options.max_seq_len and options.workload:
        raise ValueError("a workload has its own lengths; leave out --workload or --max-seq-len")
    if (options.checkpoint or options.model_kwargs) and not options.model:
        raise ValueError("--checkpoint and --model-kwargs go with --model NAME")
    defaults = model.DEFAULTS if options.model else pos_embed.DEFAULTS
    chosen = {name: getattr(options, name) or default for name, default in defaults.items()}
    make: Callable[..., Race] = partial(pos_embed.race, device=options.device, channels=options.channels)
    patch_size = 16
    if options.model:
        valid = (*defaults["phases"], BASELINE, *STRATEGY_NAMES)
        if wrong := {*chosen["phases"], *chosen["contenders"]} - {*valid}:
            raise ValueError(f"{' '.join(wrong)} cannot be timed in a whole model; valid: {' '.join(valid)}")
        if options.device == "cuda" and not options.dtypes:
            chosen["dtypes"] = ["bfloat16"]
        untrained: dict[str, Any] = {} if options.checkpoint else dict(num_classes=1000, random_weights=True)
        made, _ = load_model(options.model, options.checkpoint, **untrained | dict(options.model_kwargs))
        make, patch_size = partial(model.race, made.to(options.device)), made.embeds.patch_size[0]
    workloads = _workloads(options, patch_size)
    for workload in [] if options.model else list(workloads):
        if why := workload.missing():
            print(f"not run: workload {workload.name}, {why}")
            workloads.remove(workload)
    ways = list(product(workloads, chosen["dtypes"], chosen["phases"], sorted(set(chosen["batches"]))))
    changing: dict[Any, float] = {}
    with progress("timing", len(ways)) as bar:
        for workload, dtype, phase, batch in ways:
            with ExitStack() as on:
                race = make(workload, batch, dtype, phase, chosen["contenders"], on)
                time = partial(run, race, options.rounds, device=options.device, budget=options.budget)
                rows = time(advance=bar.update)
                works = {(workload.name, dtype, batch, row["contender"]): row["median_ms"] for row in rows}
                if phase == "frozen" and any(ms > SLOW * changing.get(work, ms) for work, ms in works.items()):
                    rows = time()
            changing |= works if phase == "infer" else {}
            bar.clear()
            yield race, rows


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
