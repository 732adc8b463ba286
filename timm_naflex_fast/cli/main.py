"""The command ``naflex-fast``.

It imports a command's module only when that command is named, and that one torch only when its
options are right: so help and errors come at once.
"""

import argparse
import io
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from .. import __version__
from ..measure.output import check_writable, printable, to_json, write_json
from ..names import did_you_mean

COMMANDS = {  # each is a function of the module of its name
    "info": "versions, GPUs, and what is patched",
    "drift": "how far each strategy moves a model from timm's own result",
    "bench": "how much faster a step of a model becomes, eager or compiled",
    "run": "run a script, unchanged, with timm patched",
    "export": "export a model to ONNX or torch.export, verified in every runtime that is installed",
    "record": "write what a model makes of pictures, stage by stage, for ports to be compared with",
    "compare": "tell where a port parts from a recording, and why",
    "identify": "tell how a port resampled its position embeddings",
}
PIPE_CLOSED = 141  # a shell's status for a program that SIGPIPE ended


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one usage line, and name what was probably meant."""

    def error(self, message: str) -> NoReturn:
        """End with status 2."""
        message = printable(message)
        # argparse tells of a wrong word only in these two sentences, and of its options only in
        # the usage line.
        wrong = re.search(r"(?:invalid choice: '|unrecognized arguments: )([\w-]+)", message)
        if wrong:
            known = re.findall(
                r"--[\w-]+|\w+(?:-\w+)*", message[wrong.end() :] + self.format_usage()
            )
            message += did_you_mean(wrong[1], known)
        usage = f"usage: {self.prog} [OPTIONS] ({self.prog} --help names them)"
        self.exit(2, f"{usage}\n{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (default: the command line) names; return the exit status."""
    if argv is None:
        _start_in_utf8()
        argv = sys.argv[1:]
    options = argparse.Namespace(command=shlex.join(["naflex-fast", *argv]))
    return call(" ".join(["naflex-fast", *argv[:1]]), partial(_run, argv), options)


def _run(argv: Sequence[str], options: argparse.Namespace) -> int:
    """Read ``argv`` into ``options``, and do what it names."""
    commands = [f"    {name:<10}{what}" for name, what in COMMANDS.items()]
    parser = Parser(
        "naflex-fast",
        description="Fast and exact resampling.",
        epilog="\n".join(["commands, whose options COMMAND --help names:", *commands]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"timm_naflex_fast {__version__}")
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS)
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    name = parser.parse_args(argv[:1]).command
    # Abbreviations would change their meaning with each option that is added.
    own = Parser(f"naflex-fast {name}", description=COMMANDS[name], allow_abbrev=False)
    own.add_argument("--debug", action="store_true", help="show the traceback of an error")
    module = import_module(f".{name}", __package__)
    module.add_arguments(own)
    own.parse_args(argv[1:], options)
    # Called anew: where its words go, and whether a traceback is shown, is known only now.
    return call(own.prog, getattr(module, name), options)


def call(
    command: str, action: Callable[[argparse.Namespace], int], options: argparse.Namespace
) -> int:
    """Call ``action(options)``, whose errors name what is valid, and return the exit status.

    An error becomes one line on stderr and status 2, Ctrl-C 130; ``options.debug`` shows the
    traceback too. A reader of the output who goes away ends the command without a word, as
    ``| head`` does.

    What the action puts into the dict ``options.figures`` goes to the file of ``--json``, also when
    the action is stopped. Where that file is stdout, what the action prints goes to stderr.
    """
    _open_streams()
    try:
        with _figures(options):
            status = action(options)
        # Here, because a full disk and a closed pipe are errors like others.
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        return PIPE_CLOSED
    except KeyboardInterrupt:
        status = 130
        message = "interrupted"
    except (ImportError, ValueError, RuntimeError, OSError) as error:
        status = 2
        message = str(error)
        if getattr(options, "debug", False):
            traceback.print_exc()
    finally:
        _end_output()
    print(f"{command}: {printable(message)}", file=sys.stderr)
    return status


@contextmanager
def _figures(options: argparse.Namespace) -> Iterator[None]:
    """Inside, a command fills ``options.figures``; then they go where ``options.json`` names."""
    figures: dict[str, Any] = {}
    options.figures = figures
    file = getattr(options, "json", None)
    words = sys.stdout
    if file == "-":
        words = sys.stderr
    elif file is not None:
        check_writable(file)
    try:
        with redirect_stdout(words):
            yield
    finally:
        if figures and file == "-":
            sys.stdout.write(to_json(figures))
        elif figures and file:
            write_json(file, figures)


def _start_in_utf8() -> None:
    """Start this process again where Python does not take the names of files for UTF-8.

    Libraries in C++ do, so there a name that is not ASCII means two files. It is so under
    ``PYTHONUTF8=0`` in the C locale, and in locales of before UTF-8.
    """
    if sys.getfilesystemencoding() != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def _open_streams() -> None:
    """Make stdout and stderr streams to which everything can be printed."""
    # The next file that is opened would get a closed one's number, and what libraries print.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a letter of a file's name shows its number.
        sys.stdout.reconfigure(errors="backslashreplace")


def _end_output() -> None:
    """Write what stdout still holds, or drop it: Python would try again as it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
