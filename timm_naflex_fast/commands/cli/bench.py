"""``naflex-fast bench``: its options, and the way from races to tables and files."""

import argparse
import random
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ...patching.choices import MODES
from ..measure.bench.workloads import Workload, fit, siglip_workload
from ..measure.contenders import BASELINE
from ..measure.images import image_sources, read, size
from ..measure.models import DTYPES, add_model_arguments, load_model
from ..measure.output import positive, printable, provenance
from .checks import announce, announce_skipped, check_model_options, keep_name

PHASES = ("train", "infer")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.epilog = (
        "A step takes as long with any weights. So without --checkpoint they are random, and none are "
        "fetched."
    )
    add_model_arguments(parser)
    add = parser.add_argument
    add(
        "--sizes-from",
        metavar="DIR",
        help="grids of a folder's images, of which only the headers are read; default: of images "
        "with aspect ratios from 1:3 to 3:1",
    )
    add(
        "--max-seq-len",
        dest="lengths",
        nargs="+",
        type=positive,
        default=[256],
        metavar="N",
        help="most patches per image, to which batches are padded; several: one after the other; "
        "default: 256",
    )
    add("--batch-size", type=positive, default=8, metavar="B", help="images in a batch; default: 8")
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of autocast; default: float32, which is without autocast",
    )
    add(
        "--phase",
        dest="phases",
        nargs="+",
        choices=PHASES,
        default=PHASES,
        help="a training step, or an inference; default: both",
    )
    modes = add(
        "--modes",
        nargs="+",
        metavar="NAME",
        choices=MODES,
        default=[BASELINE, "matmul"],
        help=f"of {' '.join(MODES)}; default: stock matmul",
    )
    keep_name(parser, "--contenders", modes)
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    add(
        "--rounds",
        type=positive,
        default=10,
        metavar="R",
        help="timed steps of each; with --compile first steps, and as many later ones, of each "
        "length; default: 10",
    )
    add(
        "--compile",
        action="store_true",
        help="count the graphs that torch.compile makes of the model, and time them",
    )
    add(
        "--json",
        metavar="FILE",
        help="also write the figures there, when it ends or is stopped; -: to stdout",
    )


def bench(options: argparse.Namespace) -> int:
    """Run the races that ``options`` name; print, and write what was asked for.

    Raises:
        ValueError: wrong options, with what is valid; before anything is timed.
    """
    # All that can be wrong is found out before torch is imported, which takes seconds.
    check_model_options(options)
    sizes = _read_sizes(options.sizes_from) if options.sizes_from else []
    announce(f"loading {options.model} ...")
    model = _load(options)

    from ..measure.bench.model import Steps, race_compiled, race_eager
    from ..measure.bench.race import HOW_TO_READ, print_race

    workloads = _workloads(options, sizes, model.embeds.patch_size[0])
    # A compiled model meets all of them in turn, an eager one has a race for each.
    race = race_eager
    together = [[workload] for workload in workloads]
    if options.compile:
        race = race_compiled
        together = [workloads]
    rows: list[dict[str, Any]] = []
    made = provenance(options.command)
    for some, phase in product(together, options.phases):
        steps = Steps(model, some, options.batch_size, options.dtype, phase)
        found = race(steps, options.modes, options.rounds)
        print_race(found)
        rows += found
        # Whatever stops the next race, these are kept.
        options.figures.update(made, rows=rows)
    print(HOW_TO_READ)
    return 0


def _read_sizes(folder: str) -> list[tuple[int, int]]:
    """The sizes (height, width) in the headers of a folder's images; says which has none."""
    skipped: list[str] = []
    sizes = [found for _, found in read(image_sources(folder, skipped), size, skipped)]
    announce_skipped(skipped)
    return sizes


def _load(options: argparse.Namespace) -> Any:
    """The model, on its device."""
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("PyTorch sees no GPU here; valid: --device cpu")
    settings = dict(options.model_kwargs)
    is_random = not options.checkpoint
    model, _ = load_model(options.model, options.checkpoint, random_weights=is_random, **settings)
    return model.to(options.device)


def _workloads(
    options: argparse.Namespace, sizes: Sequence[tuple[int, int]], patch_size: int
) -> list[Workload]:
    """The grids of each length: of a folder's images, or of random ones."""
    if not sizes:
        return [siglip_workload(length) for length in options.lengths]
    folder = printable(Path(options.sizes_from).resolve().name)
    found = []
    for length in options.lengths:
        # A list, not a set: a grid that many images have is drawn as often.
        grids = [fit(height, width, length, patch_size) for height, width in sizes]
        draw = partial(random.Random.choice, seq=grids)
        found.append(Workload(f"{folder}-{length}", draw, length))
    return found
