"""``naflex-fast compare``: its options, and the way from two folders to a verdict.

It needs neither a model nor torch, so it answers at once.
"""

import argparse
from pathlib import Path

from ..measure.output import origin, write_files
from ..text_table import table
from .against import PARTS

PAGE = "compare.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.epilog = (
        "Exit status: 0 if the port is right, 1 if it parts, 2 if it cannot be compared."
    )
    parser.add_argument("reference", metavar="REFERENCE", help="folder of a recording")
    parser.add_argument(
        "port", metavar="PORT", help="folder of a port's stages.safetensors, or 000.block_0.npy ..."
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures there; -: to stdout")
    parser.add_argument("--out", metavar="DIR", help=f"also write {PAGE} there")


def compare(options: argparse.Namespace) -> int:
    """Compare a port with a recording, and print where it parts and why.

    Raises:
        ValueError: one of them cannot be used; says why.
        OSError: results cannot be written.
    """
    from ..recordings.compare import compare_recordings
    from ..recordings.format import read_port, read_recording
    from ..recordings.verdict import as_json, cells, page, sentences

    if options.out and Path(options.out).is_file():
        raise NotADirectoryError(f"{options.out} is a file; --out takes a folder")
    reference = read_recording(Path(options.reference))
    ports = read_port(Path(options.port), reference)

    comparison, reasons = compare_recordings(reference, ports)
    print(table([cells(row) for row in comparison.rows()]))
    for sentence in sentences(comparison, reasons):
        print(sentence)
    options.figures.update({**origin(options.command), **as_json(comparison, reasons)})
    if options.out:
        folder = Path(options.out)
        folder.mkdir(parents=True, exist_ok=True)
        title = f"{folder_name(options.port)} against {folder_name(options.reference)}"
        write_files({folder / PAGE: page(comparison, reasons, reference, ports, title)})
        print(f"written: {folder / PAGE}")
    return PARTS if any(row.parting for row in comparison.rows()) else 0


def folder_name(text: str) -> str:
    """The name of a folder, without its parents."""
    return Path(text).resolve().name
