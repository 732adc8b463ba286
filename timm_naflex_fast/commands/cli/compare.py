"""``naflex-fast compare``: its options, and the way from two folders to a verdict.

It needs neither a model nor torch, so it answers at once.
"""

import argparse
from pathlib import Path

from ...text_table import table
from ..measure.output import origin
from ..recordings import PRECISIONS
from .against import PARTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.epilog = (
        "Exit status: 0 if the port is right, 1 if it parts, 2 if it cannot be compared or pictures "
        "are missing."
    )
    parser.add_argument("reference", metavar="REFERENCE", help="folder of a recording")
    parser.add_argument(
        "port",
        metavar="PORT",
        nargs="?",
        help="folder of a port's stages.safetensors, or 000.block_0.npy ...; without it, the known "
        "mistakes are printed",
    )
    add_precision(parser)
    parser.add_argument(
        "--partial", action="store_true", help="the port is meant to lack some of the pictures"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures there; -: to stdout")


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
    from ..recordings.compare import compare_folders
    from ..recordings.format import read_about
    from ..recordings.verdict import as_json, cells, sentences

    if options.port is None:
        about = read_about(Path(options.reference))
        columns = ("name", "stage", "words")
        print(table([{key: one[key] for key in columns} for one in about["mistakes"]]))
        return 0
    found = compare_folders(options.reference, options.port, options.precision)
    said = sentences(found)
    if found.missing:
        print(said.pop(0))
    print(table([cells(row) for row in found.rows]))
    print("\n".join(said))
    options.figures.update({**origin(options.command), **as_json(found)})
    if found.missing and not options.partial:
        return 2  # as an error
    return 0 if found.first is None else PARTS
