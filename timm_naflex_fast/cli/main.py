"""The command ``naflex-fast``. It imports a command's module, and with it torch, only when that command is named."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from .. import __version__

COMMANDS = {  # name: (module in this package, function, help)
    "info": ("cli.info", "info", "versions, what is patched, accelerators, caches"),
    "drift": ("measure.drift.command", "drift", "how far each strategy moves a model from timm's own result"),
    "bench": ("measure.bench.command", "bench", "time the strategies against timm, its alternatives and a plain add"),
    "run": ("cli.run", "run", "run a script, unchanged, with timm patched"),
    "identify": ("cli.identify", "identify", "tell how a port resampled its position embeddings"),
}


def run(command: str, action: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Call ``action(options)``; an error that names what is valid becomes one line and exit status 2."""
    try:
        return action(options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Parse ``argv`` (default: the command line) and run the command that it names; return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] not in COMMANDS:
        parser = _parser()
        parser.parse_args(arguments)  # ends here with the help, the version, or an error
        parser.error(f"the command comes first; valid: {', '.join(COMMANDS)}")
    name, *rest = arguments
    where, function, about = COMMANDS[name]
    module = import_module(f"..{where}", __package__)
    parser = argparse.ArgumentParser(f"naflex-fast {name}", description=f"{about}.".capitalize(), allow_abbrev=False)
    module.add_arguments(parser)
    options = parser.parse_args(rest)
    options.arguments, options.command = arguments, shlex.join(["naflex-fast", *arguments])
    return run(parser.prog, getattr(module, function), options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "naflex-fast", description="Fast and exact resampling for timm's NaFlexVit.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"timm_naflex_fast {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, (_, _, about) in COMMANDS.items():
        commands.add_parser(name, help=about)
    return parser
