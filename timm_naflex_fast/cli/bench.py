"""``naflex-fast bench``: its options, and the way from races to tables and files.

Nothing heavy is imported until the command runs, so ``--help`` answers at once.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from ..measure.bench.workloads import WORKLOADS, Workload, folder_workload, read_sizes, siglip_grids
from ..measure.contenders import BASELINE, CONTENDERS, PLAIN_ADD
from ..measure.models import DTYPES, add_model_arguments, load_model
from ..measure.output import check_writable, positive, printable, progress, provenance, write_json
from ..names import STRATEGY_NAMES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add, some = parser.add_argument, dict[str, Any](nargs="+", metavar="NAME")
    numbers = dict[str, Any](nargs="+", type=positive)
    phases, contenders = ("infer", "frozen", "train"), (*CONTENDERS, PLAIN_ADD)
    shapes = parser.add_mutually_exclusive_group().add_argument
    default = "default: all; with --model: siglip"
    shapes("--workload", **some, choices=WORKLOADS, help=f"of {' '.join(WORKLOADS)}; {default}")
    shapes(
        "--sizes-from",
        metavar="DIR",
        help="grids of a folder's images; only their headers are read",
    )
    length = "most patches per image, to which batches are padded; several: one after the other; default: 256"
    add("--max-seq-len", **numbers, metavar="N", help=length)
    images = "images in a batch; several: one after the other; default: 64, with --model 8"
    add("--batch-size", dest="batches", **numbers, metavar="B", help=images)
    dtype = "of the tokens; default: float32"
    add("--dtype", dest="dtypes", **some, choices=DTYPES, help=dtype)
    add(
        "--phase",
        dest="phases",
        **some,
        choices=phases,
        help=f"of {' '.join(phases)}; default: all",
    )
    whole = f"of {' '.join(contenders)}; default: all, with --model stock and matmul"
    add("--contenders", **some, choices=contenders, help=whole)
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    add(
        "--channels",
        type=positive,
        default=768,
        metavar="C",
        help="width of the tokens; default: 768",
    )
    most = "timed rounds, at most; default: 30, with --compile 10: first steps, and as many later ones, of each length"
    add("--rounds", type=positive, metavar="R", help=most)
    enough = (
        "seconds for each contender in a race, but at least 3 rounds; default: 2, with --model 30"
    )
    add("--budget", type=float, metavar="S", help=enough)
    add_model_arguments(parser)
    add(
        "--compile",
        action="store_true",
        help="count the graphs that torch.compile makes of --model, and time them",
    )
    add("--json", metavar="FILE", help="also write the figures there, after each race")


def bench(options: argparse.Namespace) -> int:
    """Run the races that ``options`` name; print, and write what was asked for.

    Raises:
        ValueError: options that do not go together, with what is valid; before anything is timed.
        OSError: ``--json`` cannot be written; before anything is timed.
    """
    from ..measure.bench.race import HOW_TO_READ, print_race

    check_writable(options.json)
    rows: list[dict[str, Any]] = []
    for title, found in _races(options):
        print_race(title, found)
        rows += found
        if options.json:  # whatever stops the next race, these are kept
            write_json(options.json, {**provenance(options.command), "rows": rows})
    if rows:
        print(HOW_TO_READ)
    if options.json and rows:
        print(f"written: {printable(options.json)}")
    if not options.model:
        print(
            "In a model the position embedding is a small part of a step: bench --model NAME times a whole one."
        )
    return 0 if rows else 2


def _races(options: argparse.Namespace) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Make and run one race after the other; yield the title of each, and its rows."""
    import torch

    from ..measure.bench import model, pos_embed
    from ..measure.bench.race import run

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch sees no GPU here; valid: --device cpu")
    if options.max_seq_len and options.workload:
        raise ValueError("a workload has its own lengths; leave out --workload or --max-seq-len")
    if (options.checkpoint or options.model_kwargs or options.compile) and not options.model:
        raise ValueError("--checkpoint, --model-kwargs and --compile go with --model NAME")
    defaults = model.DEFAULTS if options.model else pos_embed.DEFAULTS
    chosen = {name: getattr(options, name) or default for name, default in defaults.items()}
    make: Callable[..., Any] = partial(
        pos_embed.race, device=options.device, channels=options.channels
    )
    patch_size, made = 16, None
    if options.model:
        valid = (*defaults["phases"], BASELINE, *STRATEGY_NAMES)
        if wrong := {*chosen["phases"], *chosen["contenders"]} - {*valid}:
            raise ValueError(
                f"{' '.join(wrong)} cannot be timed in a whole model; valid: {' '.join(valid)}"
            )
        untrained: dict[str, Any] = (
            {} if options.checkpoint else dict(num_classes=1000, random_weights=True)
        )
        made, _ = load_model(
            options.model, options.checkpoint, **untrained | dict(options.model_kwargs)
        )
        make, patch_size = partial(model.race, made.to(options.device)), made.embeds.patch_size[0]
    workloads = _workloads(options, patch_size)
    if not options.model and (impossible := [work for work in workloads if not work.possible()]):
        print(
            f"not run: workload {', '.join(work.name for work in impossible)}, whose table this timm cannot have"
        )
        workloads = [work for work in workloads if work not in impossible]
    budget = (30.0 if options.model else 2.0) if options.budget is None else options.budget
    each = [workloads] if options.compile else [[workload] for workload in workloads]
    ways = list(product(each, chosen["dtypes"], chosen["phases"], sorted(set(chosen["batches"]))))
    with progress("timing", len(ways)) as bar:
        for some, dtype, phase, batch in ways:
            with ExitStack() as stack:
                if options.compile:
                    steps = options.rounds or 10
                    race, rows = model.compiled(
                        made, some, batch, dtype, phase, chosen["contenders"], steps
                    )
                    bar.update(1)
                else:
                    race = make(*some, batch, dtype, phase, chosen["contenders"], stack)
                    rows = run(race, options.rounds or 30, budget=budget, advance=bar.update)
            bar.clear()
            yield race.title, rows


def _workloads(options: argparse.Namespace, patch_size: int) -> list[Workload]:
    siglip, found = WORKLOADS["siglip"], []
    if not options.sizes_from and not options.max_seq_len:
        return [
            WORKLOADS[name]
            for name in options.workload or (["siglip"] if options.model else WORKLOADS)
        ]
    for most in options.max_seq_len or [256]:
        if not options.sizes_from:
            found.append(
                replace(siglip, name=f"siglip-{most}", draw=siglip_grids(most), length=most)
            )
            continue
        grids, unreadable = read_sizes(options.sizes_from, most, patch_size)
        for line in unreadable if not found else ():
            print(f"not read: {line}")
        print(
            f"{len(grids):,} images, {len(set(grids)):,} distinct grids of at most {most} tokens\n"
        )
        found.append(folder_workload(options.sizes_from, grids, siglip, most))
    return found
