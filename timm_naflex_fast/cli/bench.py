"""``naflex-fast bench``: its options, and the way from races to tables and files."""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

from ..measure.bench.workloads import (
    WORKLOADS,
    Size,
    Workload,
    fit,
    folder_workload,
    read_sizes,
    siglip_workload,
)
from ..measure.contenders import BASELINE
from ..measure.models import DTYPES, add_model_arguments, load_model
from ..measure.output import check_writable, positive, printable, progress, provenance, write_json
from ..names import STRATEGY_NAMES
from .checks import announce, check_model_options

PHASES = ("train", "infer")
CONTENDERS = (BASELINE, *STRATEGY_NAMES)
EAGER_ROUNDS, COMPILED_ROUNDS = 30, 10
LENGTH = 256

# Runs a race, calls its argument now and then with the share that was done since the last call, and
# returns the race and its rows.
RunRace = Callable[[Callable[[float], Any]], tuple[Any, list[dict[str, Any]]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_model_arguments(parser)
    shapes = parser.add_mutually_exclusive_group()
    shapes.add_argument(
        "--workload",
        dest="workloads",
        nargs="+",
        metavar="NAME",
        choices=WORKLOADS,
        help=f"grids of the images, of {' '.join(WORKLOADS)}; default: siglip",
    )
    shapes.add_argument(
        "--sizes-from",
        metavar="DIR",
        help="grids of a folder's images; only their headers are read",
    )
    add = parser.add_argument
    add(
        "--max-seq-len",
        dest="lengths",
        nargs="+",
        type=positive,
        metavar="N",
        help="most patches per image, to which batches are padded; several: one after the other; "
        f"default: {LENGTH}",
    )
    add(
        "--batch-size",
        dest="batches",
        nargs="+",
        type=positive,
        default=[8],
        metavar="B",
        help="images in a batch; several: one after the other; default: 8",
    )
    add(
        "--dtype",
        dest="dtypes",
        nargs="+",
        metavar="NAME",
        choices=DTYPES,
        default=["float32"],
        help="of autocast; default: float32, without autocast",
    )
    add(
        "--phase",
        dest="phases",
        nargs="+",
        metavar="NAME",
        choices=PHASES,
        default=PHASES,
        help=f"of {' '.join(PHASES)}; default: both",
    )
    add(
        "--contenders",
        nargs="+",
        metavar="NAME",
        choices=CONTENDERS,
        default=[BASELINE, "matmul"],
        help=f"of {' '.join(CONTENDERS)}; default: {BASELINE} matmul",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    add(
        "--rounds",
        type=positive,
        metavar="R",
        help=f"timed rounds, at most; default: {EAGER_ROUNDS}, with --compile {COMPILED_ROUNDS}: "
        "first steps, and as many later ones, of each length",
    )
    add(
        "--budget",
        type=seconds,
        default=30.0,
        metavar="S",
        help="seconds for each contender in a race, but at least 3 rounds; default: 30",
    )
    add(
        "--compile",
        action="store_true",
        help="count the graphs that torch.compile makes of the model, and time them",
    )
    add("--json", metavar="FILE", help="also write the figures there, after each race")


def seconds(text: str) -> float:
    """An option's number above 0; any other is a ValueError, which argparse reports."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError
    return value


def bench(options: argparse.Namespace) -> int:
    """Run the races that ``options`` name; print, and write what was asked for.

    Raises:
        ValueError: options that do not go together, with what is valid; before anything is timed.
        OSError: ``--json`` cannot be written; before anything is timed.
    """
    sizes = check_options(options)
    announce(f"loading {options.model} ...")
    races = make_races(options, sizes)

    from ..measure.bench.race import HOW_TO_READ, print_race

    rows: list[dict[str, Any]] = []
    with progress("timing", len(races)) as bar:
        for run_race in races:
            race, found = run_race(bar.update)
            bar.clear()
            print_race(race.title, found)
            rows += found
            if options.json:  # whatever stops the next race, these are kept
                write_json(options.json, {**provenance(options.command), "rows": rows})
    print(HOW_TO_READ)
    if options.json:
        print(f"written: {printable(options.json)}")
    return 0


def check_options(options: argparse.Namespace) -> list[Size]:
    """Tell what is wrong before torch is imported; return the sizes of the folder's images."""
    check_model_options(options)
    if options.lengths and options.workloads:
        raise ValueError("a workload has its own lengths; leave out --workload or --max-seq-len")
    check_writable(options.json)
    if not options.sizes_from:
        return []
    sizes, unreadable = read_sizes(options.sizes_from)
    for line in unreadable:
        print(f"not read: {line}")
    return sizes


def make_races(options: argparse.Namespace, sizes: Sequence[Size]) -> list[RunRace]:
    """Load the model, and make a race for each combination of what the options name."""
    import torch

    from ..measure.bench import model as of_model

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch sees no GPU here; valid: --device cpu")
    settings = dict(options.model_kwargs)
    if not options.checkpoint:  # the weights do not change how long a step takes
        settings = {"num_classes": 1000, "random_weights": True, **settings}
    model, _ = load_model(options.model, options.checkpoint, **settings)
    model.to(options.device)
    workloads = _workloads(options, sizes, model.embeds.patch_size[0])
    # A compiled model meets all of them in turn, an eager one has a race for each.
    together = [workloads] if options.compile else [[workload] for workload in workloads]
    races: list[RunRace] = []
    batches = sorted(set(options.batches))
    for some, dtype, phase, batch in product(together, options.dtypes, options.phases, batches):
        steps = of_model.Steps(model, some, batch, dtype, phase)
        if options.compile:
            rounds = options.rounds or COMPILED_ROUNDS
            races.append(partial(of_model.race_compiled, steps, options.contenders, rounds))
        else:
            rounds = options.rounds or EAGER_ROUNDS
            eager = partial(of_model.race_eager, steps, options.contenders, rounds, options.budget)
            races.append(eager)
    return races


def _workloads(
    options: argparse.Namespace, sizes: Sequence[Size], patch_size: int
) -> list[Workload]:
    """The grids that the options name: of workloads, of other lengths, or of a folder's images."""
    if options.workloads:
        return [WORKLOADS[name] for name in options.workloads]
    if options.sizes_from:
        lengths = options.lengths or [LENGTH]
        return [_of_folder(options.sizes_from, sizes, length, patch_size) for length in lengths]
    if options.lengths:
        return [siglip_workload(length) for length in options.lengths]
    return [WORKLOADS["siglip"]]


def _of_folder(folder: str, sizes: Sequence[Size], length: int, patch_size: int) -> Workload:
    """The grids of a folder's images in at most ``length`` patches; prints how many there are."""
    grids = [fit(height, width, length, patch_size) for height, width in sizes]
    distinct = len(set(grids))
    print(f"{len(grids):,} images, {distinct:,} distinct grids of at most {length} tokens\n")
    return folder_workload(folder, grids, length)
