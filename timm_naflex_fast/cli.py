"""The command ``naflex-fast``: ``info``, ``drift`` and ``bench``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from .bench.command import add_arguments as add_bench_arguments
from .bench.command import bench
from .drift.command import add_arguments as add_drift_arguments
from .drift.command import drift


def info(options: argparse.Namespace) -> int:
    """Print versions and what is replaced."""
    from .patch import status

    print(status())
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
    commands.add_parser("info", help="versions, and what is replaced").set_defaults(action=info)
    drift_parser = commands.add_parser("drift", help="how far each strategy moves a model from timm's own result")
    add_drift_arguments(drift_parser)
    drift_parser.set_defaults(action=drift)
    bench_parser = commands.add_parser("bench", help="time the strategies against timm, its alternatives and the floor")
    add_bench_arguments(bench_parser)
    bench_parser.set_defaults(action=bench)
    options = parser.parse_args(argv)
    options.arguments = list(sys.argv[1:] if argv is None else argv)
    return run(f"naflex-fast {options.command}", options.action, options)
