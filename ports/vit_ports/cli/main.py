"""The command ``vit-ports``: its errors are one line, and name what is valid.

Tests: ports/tests/cli/test_main.py.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence

from .. import __version__
from . import compare, identify
from .output import printable

CANNOT = 2  # the exit status, argparse's too
INTERRUPTED = 130
PIPE_CLOSED = 141  # a shell's status for a program that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (default: the command line) names; return the exit status."""
    if argv is None:
        argv = sys.argv[1:]
    parser = argparse.ArgumentParser("vit-ports", description="Is a port of a vision tower right?")
    parser.add_argument("--version", action="version", version=f"vit_ports {__version__}")
    commands = parser.add_subparsers(dest="name", metavar="COMMAND", required=True)
    for module in (compare, identify):
        module.add_command(commands)
    options = parser.parse_args(argv)
    options.command = shlex.join(["vit-ports", *argv])
    try:
        status: int = options.action(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        sys.stdout = None  # Python would flush it again as it ends
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except (OSError, ValueError) as error:
        print(f"vit-ports {options.name}: {printable(error)}", file=sys.stderr)
        return CANNOT
