"""The command ``naflex-fast``.

A command imports torch only when its options are right: so help and errors come at once.
"""

import argparse
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib import import_module

from ... import __version__
from ..measure.output import check_writable, one_line, printable, to_json, written_whole

# By what they are for; the module of its name has ``add_arguments`` and ``action``.
LIST = """\
use:
    run       run a script, unchanged, with timm patched
    export    export a model to ONNX or torch.export, compared in every runtime that is installed
    info      versions, GPUs, and what is patched
measure:
    drift     how far each mode moves a model from timm's own result
    bench     how much faster a step of a model becomes, eager or compiled
port:
    record    write what a SigLIP-2 tower makes of pictures, stage by stage
"""
EXAMPLES = """\

examples:
    naflex-fast run train.py ARGS
    naflex-fast export --model NAME --out model.onnx
    naflex-fast drift --model NAME --images DIR --out REPORT
"""
COMMANDS = dict(re.findall(r"^    (\w+) +(.+)$", LIST, re.MULTILINE))
PIPE_CLOSED = 141  # a shell's status for a program that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (default: the command line) names; return the exit status."""
    if argv is None:
        argv = sys.argv[1:]
    parser = argparse.ArgumentParser(
        "naflex-fast",
        description="Compile and export timm's NaFlexViT with its trained position embeddings.",
        epilog=LIST + EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"timm_naflex_fast {__version__}")
    commands = parser.add_subparsers(
        metavar="COMMAND",
        required=True,
        help="one of those below; COMMAND --help lists its options, defaults in parentheses",
    )
    for name, what in COMMANDS.items():
        # Abbreviations would change their meaning with each option that is added.
        own = commands.add_parser(name, description=what, allow_abbrev=False)
        # What the others need takes 50 ms to import.
        if name in argv:
            module = import_module(f".{name}", __package__)
            own.add_argument("--debug", action="store_true", help="show the traceback of an error")
            module.add_arguments(own)
            own.set_defaults(action=module.action, prog=own.prog)
    if not argv:
        parser.print_help(sys.stderr)
        return 2
    options = parser.parse_args(argv)
    options.command = shlex.join(["naflex-fast", *argv])
    return call(options.prog, options.action, options)


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
    try:
        with _figures(options):
            return action(options)
    except BrokenPipeError:
        sys.stdout = None  # Python would flush it again as it ends
        return PIPE_CLOSED
    except KeyboardInterrupt:
        status = 130
        message = "interrupted"
    except Exception as error:
        status = 2
        message = str(error)
        # Of ours, or of a library that has errors of its own, as ONNX Runtime.
        if not isinstance(error, (ImportError, ValueError, RuntimeError, OSError)):
            message = f"{one_line(error)} (--debug shows where)"
        if getattr(options, "debug", False):
            traceback.print_exc()
    print(f"{command}: {printable(message)}", file=sys.stderr)
    return status


@contextmanager
def _figures(options: argparse.Namespace) -> Iterator[None]:
    """Inside, a command fills ``options.figures``; then they go where ``options.json`` names."""
    options.figures = {}
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
        if options.figures and file == "-":
            sys.stdout.write(to_json(options.figures))
        elif options.figures and file:
            with written_whole(file) as made:
                made.write_text(to_json(options.figures), encoding="utf-8")
        sys.stdout.flush()
