"""``vit-ports compare``: its options, and the way from two folders to a verdict."""

import argparse
import datetime
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from .. import __version__
from ..compare import compare_folders
from ..format import PRECISIONS, read_about
from ..verdict import as_json, cells, sentences
from .output import marked, table, write_whole

PARTS = 1  # the exit status
MISSING = 2  # as an error


def add_command(commands: Any) -> None:
    """Add the command and its options."""
    parser = commands.add_parser(
        "compare",
        help="tell where a port parts from a recording, and why",
        epilog="Exit status: 0 if the port is right, 1 if it parts, 2 if it cannot be compared or "
        "pictures are missing.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("reference", metavar="REFERENCE", help="folder of a recording")
    add(
        "port",
        metavar="PORT",
        nargs="?",
        help="folder of a port's stages.safetensors, or 000.block_0.npy ...; without it, the known "
        "mistakes are printed",
    )
    add_precision(parser)
    add("--partial", action="store_true", help="the port is meant to lack some of the pictures")
    add("--json", metavar="FILE", help="also write the figures there; -: to stdout")
    parser.set_defaults(action=compare)


def add_precision(parser: argparse.ArgumentParser) -> None:
    """The option that tells how a port rounds."""
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="float32",
        help="in which the port computes, or to which its weights were rounded (float32)",
    )


def compare(options: argparse.Namespace) -> int:
    """Compare a port with a recording, and print where it parts and why.

    Raises:
        ValueError: one of them cannot be used; says why.
        OSError: results cannot be written.
    """
    if options.port is None:
        about = read_about(Path(options.reference))
        columns = ("name", "stage", "words")
        print(table([{key: one[key] for key in columns} for one in about["mistakes"]]))
        return 0
    found = compare_folders(options.reference, options.port, options.precision)
    said = sentences(found)
    # A script that reads the figures from stdout reads no words there.
    with redirect_stdout(sys.stderr if options.json == "-" else sys.stdout):
        if found.missing:
            print(said.pop(0))
        print(marked(table([cells(row) for row in found.rows])))
        print("\n".join(said))
    if options.json:
        today = datetime.date.today().isoformat()
        made = {"command": options.command, "vit_ports": __version__, "date": today}
        text = json.dumps({**made, **as_json(found)}, indent=1) + "\n"
        if options.json == "-":
            sys.stdout.write(text)
        else:
            write_whole(Path(options.json), text)
    if found.missing and not options.partial:
        return MISSING
    return 0 if found.first is None else PARTS
