"""``naflex-fast compare``: its options, and the way from two folders to a verdict.

It needs neither a model nor torch, so it answers at once.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from ...text_table import table
from ..measure.output import origin

PARTS = 1  # the exit status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.epilog = (
        "Exit status: 0 if the port is right, 1 if it parts, 2 if it cannot be compared."
    )
    parser.add_argument("reference", metavar="REFERENCE", help="folder of a recording")
    parser.add_argument(
        "port", metavar="PORT", help="folder of a port's stages.safetensors, or 000.block_0.npy ..."
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="in which the port computes, if that is not the dtype of the arrays that it wrote",
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures there; -: to stdout")


def compare(options: argparse.Namespace) -> int:
    """Compare a port with a recording, and print where it parts and why.

    Raises:
        ValueError: one of them cannot be used; says why.
        OSError: results cannot be written.
    """
    from ..recordings.compare import compare_recordings
    from ..recordings.format import read_port, read_recording
    from ..recordings.verdict import as_json, cells, sentences

    reference = read_recording(Path(options.reference))
    port = read_port(Path(options.port), reference)
    if options.dtype:
        port = replace(port, precision=options.dtype)
    found = compare_recordings(reference, port)
    print(table([cells(row) for row in found.rows]))
    print("\n".join(sentences(found)))
    options.figures.update({**origin(options.command), **as_json(found)})
    return 0 if found.first is None else PARTS
