"""``naflex-fast bench``: its options, and the way from races to tables and files."""

from __future__ import annotations

import argparse
import importlib
import inspect
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from .race import Race, Row, run_together

# On a GPU the first run compiles, and the last one says how many rounds the budget allows.
WARMUPS = {"cpu": 1, "cuda": 3}
SUITES = {"pos_embed": "pos_embeds", "patch_embed": "patch_kernels", "rope": "ropes"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command. Nothing heavy is imported for them: names are checked when it runs."""
    add = parser.add_argument
    add("--patch-embed", action="store_true", help="time the resampling of patch kernels instead")
    add("--rope", action="store_true", help="time the rotary tables instead")
    add("--workload", nargs="+", metavar="NAME", help="single imagenet siglip diverse extreme radio (all)")
    add("--batch", nargs="+", type=int, metavar="B", help="batch sizes (64; with --plot 1 4 16 64)")
    add("--dtype", nargs="+", metavar="TYPE", help="of the tokens: float32 bfloat16 float16 (float32)")
    add("--phase", nargs="+", metavar="PHASE", help="infer frozen train (all)")
    add("--contenders", nargs="+", metavar="NAME", help="who runs (all)")
    add("--device", default="cpu", metavar="cpu|cuda", help="where (cpu)")
    add("--channels", type=int, default=768, metavar="C", help="width of the tokens (768)")
    add("--rounds", type=int, default=30, metavar="R", help="timed rounds, at most (30)")
    add("--budget", type=float, default=2.0, metavar="S", help="seconds per contender and race, at least 3 rounds (2)")
    add("--patience", type=float, metavar="S", help="who took longer than S seconds skips the larger batches")
    add("--together", action="store_true", help="time all batch sizes in turns (exacter linearity, more memory)")
    add("--no-memory", action="store_true", help="do not measure peak memory")
    add("--sizes-from", metavar="DIR", help="grids of a folder's images, headers alone; ends with a recommendation")
    add("--max-seq-len", type=int, metavar="N", help="with --sizes-from: most patches per image (256)")
    add("--patch-size", type=int, metavar="P", help="with --sizes-from: pixels along a patch's side (16)")
    add("--out", metavar="DIR", help="also write bench.json and bench.csv there")
    add(
        "--plot", action="store_true", help="also draw time over batch size and ratios per workload (to --out, or here)"
    )
    add("--read", nargs="+", metavar="FILE", help="show (and plot) these result files instead of measuring")


def bench(options: argparse.Namespace) -> int:
    """Run the races that ``options`` name; print, and write what was asked for.

    Raises:
        ValueError: an unknown name or a number that makes no sense, with what is valid; before anything is timed.
    """
    from .report import print_table, provenance, read_json, summary, write_csv, write_json

    sizes = None
    if options.read:
        read = [read_json(path) for path in options.read]
        rows, about = [row for part, _ in read for row in part], read[0][1]
        for race in dict.fromkeys(map(_key, rows)):
            print_table([row for row in rows if _key(row) == race])
    else:
        _check(options)
        about = provenance(shlex.join(["naflex-fast", *options.arguments]))
        races, sizes = _races(options)
        rows = []
        for done in _measure(races, options):
            rows += done
            print_table(done)
    for line in summary(rows):
        print(line)
    folder = Path(options.out or ".")
    if options.out:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "bench.json", rows, about)
        write_csv(folder / "bench.csv", rows, about)
        print(f"written: {folder / 'bench.json'}, {folder / 'bench.csv'}")
    if options.plot:
        from .plot import plot

        print(f"written: {', '.join(map(str, plot(rows, folder)))}")
    if sizes is not None:
        from .advice import advise

        print(advise(rows, sizes))
    return 0


def _key(row: Row) -> Any:
    from .report import key

    return key(row)


def _check(options: argparse.Namespace) -> None:
    import torch

    if options.device not in ("cpu", "cuda"):
        raise ValueError(f"--device {options.device} is not known; valid: cpu, cuda")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no GPU here; valid: cpu")
    if options.rounds < 1 or options.budget <= 0:
        raise ValueError("--rounds must be at least 1 and --budget above 0")
    for name in ("max_seq_len", "patch_size"):
        if getattr(options, name) is not None and not options.sizes_from:
            raise ValueError(
                f"--{name.replace('_', '-')} goes with --sizes-from DIR, whose images it divides into patches"
            )
    for name in ("sizes_from", "together"):
        if getattr(options, name) and (options.patch_embed or options.rope):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} is for position embeddings; leave out --patch-embed and --rope")
    if options.plot:
        from .plot import require

        require()


def _races(options: argparse.Namespace) -> tuple[Iterator[Race], Any]:
    """The races of every suite asked for, and the folder's sizes where there is one."""
    sizes = None
    given: dict[str, Any] = dict(
        batches=options.batch,
        dtypes=options.dtype,
        phases=options.phase,
        contenders=options.contenders,
        device=options.device,
        channels=options.channels,
    )
    suites = [name for name in ("patch_embed", "rope") if getattr(options, name)] or ["pos_embed"]
    if suites == ["pos_embed"]:
        options.batch = given["batches"] = options.batch or ([1, 4, 16, 64] if options.plot else [64])
        from .pos_embeds import check
        from .workloads import WORKLOADS

        unknown = [name for name in options.workload or () if name not in WORKLOADS]
        if unknown:
            raise ValueError(f"{unknown[0]!r} is not a workload; valid: {', '.join(WORKLOADS)}")
        check(**{name: value for name, value in given.items() if value is not None})
        if options.sizes_from:
            given["workloads"], sizes = _folder(options, WORKLOADS)
        else:
            given["workloads"] = list(_runnable(options.workload, WORKLOADS))
    else:
        given["workloads"] = options.workload
    return (race for suite in suites for race in _suite(suite, given)), sizes


def _runnable(names: list[str] | None, known: dict[str, Any]) -> Iterator[Any]:
    """The workloads named; without names, all that the installed timm can have, saying which it cannot."""
    for name in names or known:
        why = known[name].missing()
        if why is None:
            yield known[name]
        elif names:
            raise ValueError(f"workload {name!r} cannot run: {why}")
        else:
            print(f"not run: workload {name}, {why}")


def _folder(options: argparse.Namespace, known: dict[str, Any]) -> tuple[list[Any], Any]:
    from .folder import folder_workload, read_sizes

    names = options.workload or ["siglip"]
    if len(names) > 1:
        raise ValueError("with --sizes-from, --workload names the one workload whose table is used (siglip)")
    most = 256 if options.max_seq_len is None else options.max_seq_len
    side = 16 if options.patch_size is None else options.patch_size
    sizes = read_sizes(options.sizes_from, most, side)
    for line in sizes.unreadable:
        print(f"not read: {line}")
    print(f"{len(sizes.grids):,} images, {sizes.distinct:,} distinct grids of at most {most} tokens\n")
    return [folder_workload(sizes, known[names[0]])], sizes


def _suite(name: str, given: dict[str, Any]) -> Iterator[Race]:
    """``races`` of a suite's module, with those of the options that it takes."""
    try:
        races = importlib.import_module(f"{__package__}.{SUITES[name]}").races
    except ModuleNotFoundError as error:
        if error.name != f"{__package__}.{SUITES[name]}":
            raise
        raise ValueError(f"this version has no bench of {name}") from error
    takes = inspect.signature(races).parameters
    yield from races(**{key: value for key, value in given.items() if value is not None and key in takes})


def _measure(races: Iterator[Race], options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of each race. A race is let go before the next is made: its tensors are large."""
    import torch

    from . import gpu
    from .memory import peak_memory
    from .report import print_left_out, title

    device = torch.device(options.device)
    together = len(set(options.batch)) if options.together else 1
    slow: dict[tuple[Any, ...], str] = {}
    with _bar(WARMUPS[device.type]) as bar:
        # Asking for one race too many would take away what those held need.
        while held := [_without_slow(race, slow) for race in islice(races, together)]:
            for race in held:
                if not race.contenders:
                    print(title(race))
                    print_left_out(race)
            results = run_together(
                held,
                options.rounds,
                budget=options.budget,
                warmup=WARMUPS[device.type],
                stopwatch=gpu.stopwatch() if device.type == "cuda" else None,
                peak_memory=None if options.no_memory else peak_memory(device),
                advance=bar(held, options.rounds),
            )
            if device.type == "cuda":
                for race in held:
                    race.about["waits_for_gpu"] = gpu.who_waits(race.contenders)
                    print(f"waits for the GPU: {', '.join(race.about['waits_for_gpu']) or 'nobody'} ({title(race)})")
            del held, race
            for row in (row for rows in results for row in rows):
                if options.patience is not None and row.median_ms > 1e3 * options.patience:
                    slow[_without_batch(row, row.contender)] = f"took {row.median_ms / 1e3:.1f} s at B={row.batch}"
            yield from filter(None, results)


def _without_batch(race: Race | Row, contender: str) -> tuple[Any, ...]:
    return race.suite, race.workload, race.phase, race.dtype, contender


def _without_slow(race: Race, slow: dict[tuple[Any, ...], str]) -> Race:
    out = {c.name: slow[_without_batch(race, c.name)] for c in race.contenders if _without_batch(race, c.name) in slow}
    if not out:
        return race
    about = {**race.about, "left_out": {**race.about.get("left_out", {}), **out}}
    return replace(race, contenders=tuple(c for c in race.contenders if c.name not in out), about=about)


@contextmanager
def _bar(warmups: int) -> Iterator[Callable[[list[Race], int], Callable[[], None]]]:
    """A progress bar where there is a terminal and rich: ``bar(races, rounds)`` starts one and says how to move it."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield lambda races, rounds: lambda: None
        return
    from .report import title

    with Progress(
        console=Console(stderr=True), transient=True, disable=not Console(stderr=True).is_terminal
    ) as progress:
        task = progress.add_task("")

        def start(races: list[Race], rounds: int) -> Callable[[], None]:
            runs = sum(len(race.contenders) for race in races) * (warmups + rounds)
            progress.reset(task, description=" and ".join(map(title, races)), total=runs)
            return lambda: progress.advance(task)

        yield start
