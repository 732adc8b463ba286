"""``vit-ports identify``: by which convention did a port resample its position embeddings?"""

import argparse
from pathlib import Path
from typing import Any

from ..families import FAMILIES
from ..format import read_arrays
from ..identify import verdict
from .compare import add_precision

NEEDED = ("result", "table", "sizes")
FIRST = next(iter(FAMILIES))


def add_command(commands: Any) -> None:
    """Add the command, its files and the family of models, whose convention is the reference."""
    parser = commands.add_parser(
        "identify",
        help="tell how a port resampled its position embeddings",
        description="Name the convention that a port's position embeddings follow. Exit status 0: "
        "the reference's; 1: another, or none that is known; 2: the files cannot be compared.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="result (sum of t*h*w, C) or padded (B, N, C): the tokens that the port made; table "
        "(H0, W0, C): what it made them of; sizes (B, 2) or with frames (B, 3): the grids. All "
        "three in one .safetensors or .npz file, or result.npy table.npy sizes.npy",
    )
    parser.add_argument(
        "--family",
        default=FIRST,
        metavar="NAME",
        choices=FAMILIES,
        help=f"the reference: {', '.join(FAMILIES)} ({FIRST})",
    )
    add_precision(parser)
    parser.set_defaults(action=identify)


def identify(options: argparse.Namespace) -> int:
    """Print the nearest conventions; return 0 if the port follows the reference, else 1.

    Raises:
        ValueError: files of another kind, or without one of the arrays; what cannot be compared.
        OSError: a file cannot be read.
    """
    arrays: dict[str, Any] = {}
    for file in options.files:
        arrays.update(read_arrays(Path(file)))
    missing = [name for name in NEEDED if name not in arrays]
    if missing:
        raise ValueError(f"there is no array {missing[0]}, only {', '.join(arrays)}")
    is_equal, lines = verdict(
        FAMILIES[options.family],
        arrays["table"],
        arrays["sizes"],
        arrays["result"],
        options.precision,
    )
    print("\n".join(lines))
    return int(not is_equal)
