"""The command ``naflex-fast``: ``info``, ``drift``, ``bench`` and ``run``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from .bench.command import add_arguments as add_bench_arguments
from .bench.command import bench
from .flags import POS_EMBED
from .launcher import add_arguments as add_run_arguments
from .launcher import launch


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The options with which a model, its weights and images are chosen."""
    parser.add_argument("--model", metavar="NAME", help="timm NaFlexVit, e.g. naflexvit_base_patch16_siglip.v2_webli")
    parser.add_argument("--checkpoint", metavar="FILE", help="local weights (default: timm's pretrained ones)")
    parser.add_argument("--random-weights", action="store_true", help="measure the untrained model")
    parser.add_argument("--images", metavar="DIR", help="folder of images to measure on")
    parser.add_argument("--max-seq-len", type=int, default=256, metavar="N", help="most patches per image (256)")
    parser.add_argument("--batch-size", type=int, default=16, metavar="B", help="images per batch (16)")
    parser.add_argument(
        "--strategies", nargs="+", default=list(POS_EMBED), choices=POS_EMBED, help="what to measure (all)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")


def drift(options: argparse.Namespace) -> int:
    """Measure a named model on a folder of images, print the table, write the JSON."""
    from .drift import ImageFolder, load_model, measure, print_table, track, write_json

    if not options.model or not options.images:
        raise ValueError("drift needs --model NAME and --images DIR")
    model, weights = load_model(options.model, options.checkpoint, random_weights=options.random_weights)
    folder = ImageFolder(options.images, model, options.max_seq_len, options.batch_size)
    images, results = measure(model, track(folder, "measuring", len(folder)), options.strategies)
    for line in folder.skipped:
        print(f"skipped, not readable as an image: {line}", file=sys.stderr)
    about = dict(model=options.model, weights=weights)
    print_table(results, **about, images=images)
    if options.json:
        write_json(options.json, results, **about, images=images)
    return 0


def info(options: argparse.Namespace) -> int:
    """Print versions, what is replaced, what the machine has, and how full the caches are."""
    from .about import about

    print(about())
    return 0


def run(command: str, action: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Call ``action(options)``; an error that names what is valid becomes one line and exit status 2."""
    try:
        return action(options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Parse ``argv`` (default: the command line) and run the command it names; returns the exit status."""
    parser = argparse.ArgumentParser("naflex-fast", description="Fast and exact resampling for timm's NaFlexVit.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, what is replaced, accelerators, caches").set_defaults(action=info)
    drift_parser = commands.add_parser("drift", help="how far each strategy moves a model from timm's own result")
    add_model_arguments(drift_parser)
    drift_parser.set_defaults(action=drift)
    bench_parser = commands.add_parser("bench", help="time the strategies against timm, its alternatives and the floor")
    add_bench_arguments(bench_parser)
    bench_parser.set_defaults(action=bench)
    run_parser = commands.add_parser("run", help="run a script, unchanged, with timm patched")
    add_run_arguments(run_parser)
    run_parser.set_defaults(action=launch)
    options = parser.parse_args(argv)
    if options.action is launch:  # what a script raises is its own
        return launch(options)
    options.arguments = list(sys.argv[1:] if argv is None else argv)
    return run(f"naflex-fast {options.command}", options.action, options)
