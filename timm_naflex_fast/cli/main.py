"""The command ``naflex-fast``.

It imports a command's module only when that command is named, and that one torch only when its
options are right: so help and errors come at once.
"""

import argparse
import difflib
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from .. import __version__
from ..measure.output import printable

COMMANDS = {  # each is a function of the module of its name
    "info": "versions, what is patched, accelerators, caches",
    "drift": "how far each strategy moves a model from timm's own result",
    "bench": "how much faster a step of a model becomes, eager or compiled",
    "run": "run a script, unchanged, with timm patched",
    "export": "export a model to ONNX or torch.export, verified in every runtime that is installed",
    "identify": "tell how a port resampled its position embeddings",
}


def call(
    command: str, action: Callable[[argparse.Namespace], int], options: argparse.Namespace
) -> int:
    """Call ``action(options)``, whose errors name what is valid, and return the exit status.

    An error becomes one line on stderr and status 2, Ctrl-C 130.
    """
    try:
        return action(options)
    except KeyboardInterrupt:
        status = 130
        message = "interrupted"
    except (ImportError, ValueError, RuntimeError, OSError) as error:
        status = 2
        message = str(error)
    if sys.stderr is not None:  # ``print`` would take None for stdout
        print(f"{command}: {printable(message)}", file=sys.stderr)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (default: the command line) names; return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        "naflex-fast", description="Fast and exact resampling.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"timm_naflex_fast {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    parsers = {}
    for name, what in COMMANDS.items():
        about = f"{what}.".capitalize()
        parsers[name] = commands.add_parser(name, help=what, description=about, allow_abbrev=False)
    if not arguments or arguments[0] not in COMMANDS:
        _end_without_command(parser, arguments)
    name, *rest = arguments

    def start(options: argparse.Namespace) -> int:
        module = import_module(f".{name}", __package__)
        module.add_arguments(parsers[name])
        status: int = getattr(module, name)(parsers[name].parse_args(rest, options))
        return status

    started = argparse.Namespace(command=shlex.join(["naflex-fast", *arguments]))
    return call(f"naflex-fast {name}", start, started)


def _end_without_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """End the process with the help, the version, or an error that names what is valid."""
    near = difflib.get_close_matches(arguments[0], COMMANDS, n=1) if arguments else []
    if near:
        parser.error(f"no command {arguments[0]!r}; did you mean {near[0]}?")
    parser.parse_args(arguments)
    parser.error(f"the command comes first; valid: {', '.join(COMMANDS)}")
