"""``naflex-fast bench``: its options, and the way from races to tables and files.

Nothing heavy is imported until the command runs, so ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..contenders import BASELINE, NAMES, OURS, PLAIN_ADD, check_names
from ..tables import check_writable, progress
from .race import Race, Row, run
from .workloads import WORKLOADS, Grid, Workload, folder_workload, read_sizes, siglip_grids

# Read by glibc as a process starts: no block is mapped by itself, and nothing is given back to the kernel.
KEPT_HEAP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(64 * 2**20)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--workload", nargs="+", metavar="NAME", help=f"{' '.join(WORKLOADS)} (all; of a model: siglip)")
    add("--batch", nargs="+", type=int, metavar="B", help="batch sizes (64; of a model: 8)")
    add("--dtype", nargs="+", metavar="TYPE", help="of the tokens: float32 bfloat16 float16 (float32)")
    add("--phase", nargs="+", metavar="PHASE", help="infer frozen train (all)")
    add("--contenders", nargs="+", metavar="NAME", help=f"of {' '.join(NAMES)} {PLAIN_ADD} (all)")
    add("--device", default="cpu", metavar="cpu|cuda", help="where (cpu)")
    add("--channels", type=int, metavar="C", help="width of the tokens (768)")
    add("--rounds", type=int, default=30, metavar="R", help="timed rounds, at most (30)")
    add("--budget", type=float, default=2.0, metavar="S", help="seconds per contender and race, at least 3 rounds (2)")
    add("--keep-heap", action="store_true", help="let glibc keep freed memory: bench starts itself again with that set")
    add("--no-memory", action="store_true", help="do not measure peak memory")
    add("--model", metavar="NAME", help="a whole timm NaFlexVit: a training step and an inference, stock and ours")
    add("--sizes-from", metavar="DIR", help="grids of a folder's images, headers alone; ends with a recommendation")
    add("--max-seq-len", "--seq-len", type=int, metavar="N", help="most patches per image, for --model or --sizes-from")
    add("--patch-size", type=int, metavar="P", help="with --sizes-from: pixels along a patch's side (16)")
    add("--json", metavar="FILE", help="also write the figures there")


def bench(options: argparse.Namespace) -> int:
    """Run the races that ``options`` name; print, and write what was asked for.

    Raises:
        ValueError: an unknown name or a number that makes no sense, with what is valid; before anything is timed.
        OSError: ``--json`` cannot be written; before anything is timed.
    """
    check_writable(options.json)
    _check(options)
    if options.keep_heap and any(os.environ.get(name) != value for name, value in KEPT_HEAP.items()):
        command = [sys.executable, "-m", "timm_naflex_fast", *options.arguments]
        return subprocess.run(command, env=os.environ | KEPT_HEAP).returncode
    from ..provenance import provenance
    from .model import conclude
    from .report import advise, write_json

    grids = _read_folder(options) if options.sizes_from else None
    rows = list[Row]()
    for done in _measure(_races(options, grids), options):
        rows += done
    if options.json:
        write_json(options.json, rows, provenance(shlex.join(["naflex-fast", *options.arguments])))
        print(f"written: {options.json}")
    if options.model:
        print("\n".join(conclude(rows)))
    elif grids is not None:
        print(advise(rows, grids))
    return 0


def _check(options: argparse.Namespace) -> None:
    """Find wrong options before the work; fill in the defaults."""
    import torch

    from . import model, pos_embed

    suite: Any = model if options.model else pos_embed
    known = (BASELINE, *OURS) if options.model else pos_embed.CONTENDERS
    options.contenders = check_names(options.contenders or [], known)
    options.contenders = options.contenders or ([BASELINE, "matmul"] if options.model else list(known))
    options.batch = options.batch or [8 if options.model else 64]
    options.dtype = options.dtype or ["bfloat16" if options.model and options.device == "cuda" else "float32"]
    options.phase = options.phase or list(suite.PHASES)
    for what, names, valid in (
        ("device", [options.device], ("cpu", "cuda")),
        ("workload", options.workload or (), WORKLOADS),
        ("dtype", options.dtype, suite.DTYPES),
        ("phase", options.phase, suite.PHASES),
    ):
        for name in names:
            if name not in valid:
                raise ValueError(f"{name!r} is not a {what}; valid: {', '.join(valid)}")
    for option in ("batch", "rounds", "budget", "channels", "max_seq_len", "patch_size"):
        value = getattr(options, option)
        if value is not None and min(value if isinstance(value, list) else [value]) <= 0:
            raise ValueError(f"--{option.replace('_', '-')} must be above 0; got {value}")
    chosen = options.sizes_from or options.model
    for wrong, message in (
        (options.device == "cuda" and not torch.cuda.is_available(), "PyTorch sees no GPU here; valid: --device cpu"),
        (options.max_seq_len and not chosen, "--max-seq-len goes with --sizes-from DIR or --model NAME"),
        (
            options.max_seq_len and options.workload and not options.sizes_from,
            "--seq-len makes a workload; leave out --workload",
        ),
        (
            options.patch_size and (options.model or not options.sizes_from),
            "--patch-size goes with --sizes-from DIR; a model has its own",
        ),
        (options.channels and options.model, "--channels goes with the embedding step alone; a model has its own"),
        (
            options.sizes_from and len(options.workload or ()) > 1,
            "with --sizes-from, --workload names the one workload whose table is used (siglip)",
        ),
    ):
        if wrong:
            raise ValueError(message)


def _read_folder(options: argparse.Namespace) -> list[Grid]:
    """The grids of the folder's images; prints what it found."""
    most = options.max_seq_len or 256
    grids, unreadable = read_sizes(options.sizes_from, most, options.patch_size or 16)
    for line in unreadable:
        print(f"not read: {line}")
    print(f"{len(grids):,} images, {len(set(grids)):,} distinct grids of at most {most} tokens\n")
    return grids


def _races(options: argparse.Namespace, grids: list[Grid] | None) -> Iterator[Race]:
    named, most = options.workload or ["siglip"], options.max_seq_len
    if grids is not None:
        workloads = [folder_workload(options.sizes_from, grids, WORKLOADS[named[0]])]
    elif most:
        workloads = [replace(WORKLOADS["siglip"], name=f"siglip-{most}", draw=siglip_grids(most))]
    elif options.model:
        workloads = [WORKLOADS[name] for name in named]
    else:
        workloads = list(_runnable(options.workload))
    how = (options.batch, options.dtype, options.phase, options.contenders)
    if options.model:
        from ..models import load_model
        from . import model

        made, _ = load_model(options.model, random_weights=True, num_classes=model.CLASSES)
        return model.races(made.to(options.device), options.model, workloads, *how)
    from . import pos_embed

    return pos_embed.races(workloads, *how, device=options.device, channels=options.channels or 768)


def _runnable(names: list[str] | None) -> Iterator[Workload]:
    """The workloads named; without names, all that the installed timm can have, printing which it cannot.

    Raises:
        ValueError: the installed timm cannot have one that was named.
    """
    for name in names or WORKLOADS:
        why = WORKLOADS[name].missing()
        if why is None:
            yield WORKLOADS[name]
        elif names:
            raise ValueError(f"workload {name!r} cannot run: {why}")
        else:
            print(f"not run: workload {name}, {why}")


def _measure(races: Iterator[Race], options: argparse.Namespace) -> Iterator[list[Row]]:
    """Print and yield the rows of each race. It is dropped before the next is made, because its tensors are large."""
    import torch

    from .meters import WARMUPS, peak_memory, stopwatch
    from .report import print_race, title

    device = torch.device(options.device)
    how: dict[str, Any] = dict(budget=options.budget, warmup=WARMUPS[device.type], stopwatch=stopwatch(device))
    if not (options.no_memory or options.model):
        how["peak_memory"] = peak_memory(device)
    while (race := next(races, None)) is not None:
        advance = progress(title(race), len(race.contenders) * (how["warmup"] + options.rounds))
        rows = run(race, options.rounds, advance=advance, **how)
        print_race(rows, race)
        del race
        yield rows
