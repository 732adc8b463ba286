"""The command ``naflex-fast``.

It imports a command's module only when that command is named, and that one torch only when its
options are right: so help and errors come at once.
"""

import argparse
import difflib
import io
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
    print(f"{command}: {printable(message)}", file=sys.stderr)
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (default: the command line) names; return the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = [f"    {name:<10}{what}" for name, what in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        "naflex-fast",
        description="Fast and exact resampling.",
        epilog="\n".join(["commands:", *commands]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"timm_naflex_fast {__version__}")
    parser.add_argument("command", metavar="COMMAND", type=_known)
    name = parser.parse_args(arguments[:1]).command
    own = argparse.ArgumentParser(
        f"naflex-fast {name}", description=f"{COMMANDS[name]}.".capitalize(), allow_abbrev=False
    )

    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a letter of a file's name shows its number.
        sys.stdout.reconfigure(errors="backslashreplace")

    def start(options: argparse.Namespace) -> int:
        module = import_module(f".{name}", __package__)
        module.add_arguments(own)
        status: int = getattr(module, name)(own.parse_args(arguments[1:], options))
        return status

    started = argparse.Namespace(command=shlex.join(["naflex-fast", *arguments]))
    return call(f"naflex-fast {name}", start, started)


def _known(name: str) -> str:
    """A command's name; an error that names what is valid, which argparse reports."""
    if name in COMMANDS:
        return name
    near = difflib.get_close_matches(name, COMMANDS, n=1) or COMMANDS
    raise argparse.ArgumentTypeError(f"no command {name!r}; did you mean {' or '.join(near)}?")
