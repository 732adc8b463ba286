"""The command ``naflex-fast``. It imports a command's module, and with it torch, only when that
command is named."""

import argparse
import io
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from .. import __version__
from ..measure.output import printable

COMMANDS = {  # each is a function of the module of its name
    "info": "versions, what is patched, accelerators, caches",
    "drift": "how far each strategy moves a model from timm's own result",
    "bench": "time the strategies against timm, its alternatives and a plain add",
    "run": "run a script, unchanged, with timm patched",
    "export": "export a model to ONNX or torch.export, verified in every runtime that is installed",
    "identify": "tell how a port resampled its position embeddings",
}


def call(
    command: str, action: Callable[[argparse.Namespace], int], options: argparse.Namespace
) -> int:
    """Call ``action(options)``; an error that names what is valid becomes one line and exit status
    2, Ctrl-C 130."""
    try:
        return action(options)
    except KeyboardInterrupt:
        status, message = 130, "interrupted"
    except (ImportError, ValueError, RuntimeError, OSError) as error:
        status, message = 2, str(error)
    if sys.stderr is not None:  # ``print`` would take None for stdout
        print(f"{command}: {printable(message)}", file=sys.stderr)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Parse ``argv`` (default: the command line) and run the command that it names; return the exit
    status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        "naflex-fast", description="Fast and exact resampling.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"timm_naflex_fast {__version__}")
    add = partial(
        parser.add_subparsers(metavar="COMMAND", required=True).add_parser, allow_abbrev=False
    )
    parsers = {
        name: add(name, help=what, description=f"{what}.".capitalize())
        for name, what in COMMANDS.items()
    }
    if not arguments or arguments[0] not in COMMANDS:
        parser.parse_args(arguments)  # ends here with the help, the version, or an error
        parser.error(f"the command comes first; valid: {', '.join(COMMANDS)}")
    name, *rest = arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a terminal that cannot show a letter shows its number

    def start(options: argparse.Namespace) -> Any:
        module = import_module(f".{name}", __package__)
        module.add_arguments(parsers[name])
        return getattr(module, name)(parsers[name].parse_args(rest, options))

    started = argparse.Namespace(command=shlex.join(["naflex-fast", *arguments]))
    return call(f"naflex-fast {name}", start, started)
