"""``naflex-fast bench``: its options, and the way from races to tables and files.

Nothing heavy is imported until the command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..contenders import NAMES, OURS, check_names
from ..tables import check_writable, progress
from .race import BASELINE, PLAIN_ADD, Race, Row, run
from .workloads import WORKLOADS, Sizes, Workload, read_sizes, siglip_grids


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--workload", nargs="+", metavar="NAME", help=f"{' '.join(WORKLOADS)} (all; of a model: siglip)")
    add("--batch", nargs="+", type=int, metavar="B", help="batch sizes (64; of a model: 8)")
    add("--dtype", nargs="+", metavar="TYPE", help="of the tokens: float32 bfloat16 float16 (float32)")
    add("--phase", nargs="+", metavar="PHASE", help="infer frozen train (all)")
    add("--contenders", nargs="+", metavar="NAME", help=f"of {' '.join(NAMES)} {PLAIN_ADD} (most)")
    add("--device", default="cpu", metavar="cpu|cuda", help="where (cpu)")
    add("--channels", type=int, metavar="C", help="width of the tokens (768)")
    add("--rounds", type=int, default=30, metavar="R", help="timed rounds, at most (30)")
    add("--budget", type=float, default=2.0, metavar="S", help="seconds per contender and race, at least 3 rounds (2)")
    add("--no-memory", action="store_true", help="do not measure peak memory")
    add("--model", metavar="NAME", help="a whole timm NaFlexVit: a training step and an inference, stock and ours")
    add("--sizes-from", metavar="DIR", help="grids of a folder's images, headers alone; ends with a recommendation")
    add("--max-seq-len", "--seq-len", type=int, metavar="N", help="most patches per image, for --model or --sizes-from")
    add("--patch-size", type=int, metavar="P", help="with --sizes-from: pixels along a patch's side (16)")
    add("--json", metavar="FILE", help="also write the figures there")
    add("--out", metavar="DIR", help=argparse.SUPPRESS)  # the last release's; wrote bench.json and bench.csv there


def bench(options: argparse.Namespace) -> int:
    """Run the races that ``options`` name; print, and write what was asked for.

    Raises:
        ValueError: an unknown name or a number that makes no sense, with what is valid; before anything is timed.
        OSError: ``--json`` cannot be written; before anything is timed.
    """
    _check(options)
    from ..provenance import provenance
    from .report import advise, print_race, summary, write_json

    sizes = _read_folder(options) if options.sizes_from else None
    about, rows = provenance(shlex.join(["naflex-fast", *options.arguments])), list[Row]()
    for done in _measure(_races(options, sizes), options):
        rows += done
        print_race(done)
    for line in summary(rows):
        print(line)
    if options.json:
        write_json(options.json, rows, about)
        print(f"written: {options.json}")
    if options.model:
        from .model import conclude

        for sentence in conclude(rows):
            print(sentence)
    elif sizes is not None:
        print(advise(rows, sizes))
    return 0


def _check(options: argparse.Namespace) -> None:
    """Find wrong options before the work; fill in the defaults."""
    if options.out:
        warnings.warn("--out DIR is now --json FILE; it writes DIR/bench.json", FutureWarning, stacklevel=2)
        check_writable(folder=options.out)
        options.json = options.json or str(Path(options.out) / "bench.json")
    check_writable(options.json)
    import torch

    if options.device not in ("cpu", "cuda"):
        raise ValueError(f"--device {options.device} is not known; valid: cpu, cuda")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no GPU here; valid: cpu")
    if options.max_seq_len is not None and not (options.sizes_from or options.model):
        raise ValueError("--max-seq-len goes with --sizes-from DIR or --model NAME, whose images it divides")
    if options.model and options.workload and options.max_seq_len is not None and not options.sizes_from:
        raise ValueError("--seq-len makes a workload of its own; leave out --workload")
    if options.patch_size is not None and (options.model or not options.sizes_from):
        raise ValueError("--patch-size goes with --sizes-from DIR; a model has its own")
    if options.model and options.channels is not None:
        raise ValueError("--channels goes with the embedding step alone; a model has its own")
    if options.sizes_from and len(options.workload or ()) > 1:
        raise ValueError("with --sizes-from, --workload names the one workload whose table is used (siglip)")

    from . import model, pos_embed

    suite: Any = model if options.model else pos_embed
    options.batch = options.batch or [8 if options.model else 64]
    options.dtype = options.dtype or ["bfloat16" if options.model and options.device == "cuda" else "float32"]
    options.phase = options.phase or list(suite.PHASES)
    chosen = options.contenders or []
    if "floor" in chosen:
        warnings.warn(f"the contender 'floor' is now called {PLAIN_ADD!r}", FutureWarning, stacklevel=2)
        chosen = [PLAIN_ADD if name == "floor" else name for name in chosen]
    if options.model:
        options.contenders = check_names(chosen, (BASELINE, *OURS)) or [BASELINE, "matmul"]
    else:
        options.contenders = check_names(chosen, (*NAMES, PLAIN_ADD)) or list(pos_embed.CONTENDERS)
    for what, names, valid in (
        ("workload", options.workload or (), WORKLOADS),
        ("dtype", options.dtype, suite.DTYPES),
        ("phase", options.phase, suite.PHASES),
    ):
        for name in names:
            if name not in valid:
                raise ValueError(f"{name!r} is not a {what}; valid: {', '.join(valid)}")
    numbers = (*options.batch, options.rounds, options.channels or 1, options.max_seq_len or 1, options.patch_size or 1)
    if min(numbers) < 1 or options.budget <= 0 or options.max_seq_len == 0 or options.patch_size == 0:
        raise ValueError("batch sizes, channels, rounds, patches and pixels must be at least 1, the budget above 0")


def _read_folder(options: argparse.Namespace) -> Sizes:
    """The grids of the folder's images; prints what it found."""
    most = options.max_seq_len or 256
    sizes = read_sizes(options.sizes_from, most, options.patch_size or 16)
    for line in sizes.unreadable:
        print(f"not read: {line}")
    print(f"{len(sizes.grids):,} images, {sizes.distinct:,} distinct grids of at most {most} tokens\n")
    return sizes


def _races(options: argparse.Namespace, sizes: Sizes | None) -> Iterator[Race]:
    named, most = options.workload or ["siglip"], options.max_seq_len
    if sizes is not None:
        workloads = [sizes.workload(WORKLOADS[named[0]])]
    elif most:
        workloads = [replace(WORKLOADS["siglip"], name=f"siglip-{most}", draw=siglip_grids(most))]
    elif options.model:
        workloads = [WORKLOADS[name] for name in named]
    else:
        workloads = list(_runnable(options.workload))
    if options.model:
        from . import model

        made = model.load(options.model, options.device)
        how = (options.batch, options.dtype, options.phase, options.contenders)
        return model.races(made, options.model, workloads, *how)
    from . import pos_embed

    where: dict[str, Any] = dict(device=options.device, channels=options.channels or 768)
    return pos_embed.races(workloads, options.batch, options.dtype, options.phase, options.contenders, **where)


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
    """The rows of each race. Each race is dropped before the next is made, because its tensors are large."""
    import torch

    from .meters import WARMUPS, peak_memory, stopwatch
    from .report import print_left_out, title

    device = torch.device(options.device)
    warmup, seconds = WARMUPS[device.type], stopwatch(device)
    memory = None if options.no_memory or options.model else peak_memory(device)
    while (race := next(races, None)) is not None:
        if not race.contenders:
            print(title(race))
            print_left_out(race)
            continue
        how: dict[str, Any] = dict(budget=options.budget, warmup=warmup, stopwatch=seconds, peak_memory=memory)
        with progress(title(race), len(race.contenders) * (warmup + options.rounds)) as advance:
            rows = run(race, options.rounds, advance=advance, **how)
        del race
        yield rows
