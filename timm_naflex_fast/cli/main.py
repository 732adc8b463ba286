"""The command ``naflex-fast``: ``info``, ``drift``, ``bench`` and ``run``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from ..measure.bench.command import add_arguments as add_bench_arguments
from ..measure.bench.command import bench
from ..measure.drift.command import add_arguments as add_drift_arguments
from ..measure.drift.command import drift
from .run import add_arguments as add_run_arguments
from .run import launch


def info(options: argparse.Namespace) -> int:
    """Print versions, what is replaced, what the machine has, and how full the caches are."""
    from .info import about

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
    parser = argparse.ArgumentParser(
        "naflex-fast", description="Fast and exact resampling for timm's NaFlexVit.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"timm_naflex_fast {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, what is replaced, accelerators, caches").set_defaults(action=info)
    drift_parser = commands.add_parser(
        "drift", help="how far each strategy moves a model from timm's own result", allow_abbrev=False
    )
    add_drift_arguments(drift_parser)
    drift_parser.set_defaults(action=drift)
    bench_parser = commands.add_parser(
        "bench", help="time the strategies against timm, its alternatives and the floor", allow_abbrev=False
    )
    add_bench_arguments(bench_parser)
    bench_parser.set_defaults(action=bench)
    run_parser = commands.add_parser("run", help="run a script, unchanged, with timm patched", allow_abbrev=False)
    add_run_arguments(run_parser)
    run_parser.set_defaults(action=launch)
    options = parser.parse_args(argv)
    if options.action is launch:  # what a script raises is its own
        return launch(options)
    options.arguments = list(sys.argv[1:] if argv is None else argv)
    return run(f"naflex-fast {options.command}", options.action, options)
