"""``naflex-fast bench``: its options, and the way from races to tables and files."""

import argparse
from functools import partial
from itertools import product
from typing import Any

from ...names import BASELINE, MODES
from ...text_table import table
from ..measure.models import add_model_arguments, load_model
from ..measure.output import positive, provenance
from .checks import announce, check_device, check_model_options

DTYPES = ("float32", "bfloat16", "float16")
PHASES = ("train", "infer")
TITLE = "{workload} {phase}, B={batch}, {dtype}, {model}, {device}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.epilog = (
        "A step takes as long with any weights. So without --checkpoint they are random, and none are "
        "fetched."
    )
    add_model_arguments(parser)
    add = parser.add_argument
    add(
        "--max-seq-len",
        nargs="+",
        type=positive,
        default=[256],
        help="most patches per image, to which batches are padded; several: one after the other "
        "(256)",
    )
    add("--batch-size", type=positive, default=8, help="images in a batch (8)")
    add(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of autocast (float32: without autocast)",
    )
    add(
        "--phase",
        nargs="+",
        choices=PHASES,
        default=PHASES,
        help="a training step, or an inference (both)",
    )
    add(
        "--modes",
        nargs="+",
        metavar="NAME",
        choices=MODES,
        default=[BASELINE, "matmul"],
        help=f"of {' '.join(MODES)} (stock matmul)",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where it runs (cpu)")
    add(
        "--compile",
        action="store_true",
        help="count the graphs that torch.compile makes of the model, and time them, in five new "
        "processes for each mode, in turns",
    )
    add(
        "--json",
        metavar="FILE",
        help="also write the figures there, when it ends or is stopped; -: to stdout",
    )


def action(options: argparse.Namespace) -> int:
    """Run the races that ``options`` name; print, and write what was asked for.

    Raises:
        ValueError: wrong options, with what is valid; before anything is timed.
    """
    # All that can be wrong is found out before torch is imported, which takes seconds.
    check_model_options(options)
    check_device(options.device)
    announce(f"loading {options.model} ...")
    from ..measure.bench import model as whole

    load = partial(
        load_model,
        options.model,
        options.checkpoint,
        random_weights=not options.checkpoint,
        **dict(options.model_kwargs),
    )
    # A compiled model meets all lengths in turn, an eager one has a race for each.
    if options.compile:
        race = partial(whole.race_compiled, load, options.modes)
        together = [options.max_seq_len]
    else:
        model, _ = load()
        race = partial(whole.race_eager, model, options.modes)
        together = [[length] for length in options.max_seq_len]
    rows: list[dict[str, Any]] = []
    # Whatever stops a race, the rows of those before it are kept.
    options.figures.update(provenance(options.command), rows=rows)
    for lengths, phase in product(together, options.phase):
        work = {"phase": phase, "dtype": options.dtype, "device": options.device}
        found = race(lengths=lengths, images=options.batch_size, **work)
        facts = {
            "model": options.model,
            "workload": " ".join(f"siglip-{length}" for length in lengths),
            "batch": options.batch_size,
            **work,
        }
        print(TITLE.format(**facts))
        _print(found)
        rows += [{**facts, "contender": mode, **figures} for mode, figures in found.items()]
    return 0


def _print(found: dict[str, dict[str, float]]) -> None:
    """Print the figures of each mode, with how many times as fast as timm's loop it is."""
    lines = []
    for mode, figures in found.items():
        if BASELINE in found:
            figures["times_faster"] = found[BASELINE]["median_ms"] / figures["median_ms"]
        shown = {key.replace("_", " "): f"{value:,.4g}" for key, value in figures.items()}
        lines.append({"mode": mode, **shown})
    print(table(lines), end="\n\n", flush=True)
