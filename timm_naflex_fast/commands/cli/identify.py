"""``naflex-fast identify``: by which convention did a port resample its position embeddings?"""

import argparse
from pathlib import Path
from typing import Any

from .checks import announce
from .compare import add_precision

NEEDED = ("result", "table", "sizes")
# Settings of ``conventions.Convention``, here where torch need not be imported for their names.
_SIGLIP2 = dict(mode="bilinear", cubic_coefficient=None)
_BILINEAR = dict(mode="bilinear", cubic_coefficient=None, antialias=False, outside="border")
_BICUBIC = dict(mode="bicubic", cubic_coefficient=-0.75, antialias=False, outside="border")
FAMILIES: dict[str, dict[str, Any]] = {  # the models that share a vision tower
    "siglip2": _SIGLIP2,  # NaFlex
    "lfm2-vl": _SIGLIP2,
    "moonvit": _BICUBIC,  # Kimi-VL, Kimi-K2.5
    "qwen3-vl": dict(**_BILINEAR, align_corners=True, positions="corners", merge=2),
    "ovis2.5": dict(**_BICUBIC, merge=2),
    "radio": dict(**_BILINEAR, ar_preserving=True),
}
"""Tests compare each with the original library's own code, or with ours that is compared with it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the files and the family of models, whose convention is the reference."""
    parser.description = (
        "Name the convention that a port's position embeddings follow. Exit status 0: the "
        "reference's; 1: another, or none that is known; 2: the files cannot be compared."
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
        default="siglip2",
        metavar="NAME",
        choices=FAMILIES,
        help=f"the reference: {', '.join(FAMILIES)} (siglip2)",
    )
    add_precision(parser)


def identify(options: argparse.Namespace) -> int:
    """Print the nearest conventions; return 0 if the port follows the reference, else 1.

    Raises:
        ValueError: files of another kind, or without one of the arrays; what cannot be compared.
        OSError: a file cannot be read.
    """
    from ..recordings.format import read_arrays

    arrays: dict[str, Any] = {}
    for file in options.files:
        arrays.update(read_arrays(Path(file)))
    missing = [name for name in NEEDED if name not in arrays]
    if missing:
        raise ValueError(f"there is no array {missing[0]}, only {', '.join(arrays)}")
    announce("comparing with what is known ...")
    from ..recordings.conventions import Convention
    from ..recordings.identify import verdict

    reference = Convention(**FAMILIES[options.family])
    is_equal, lines = verdict(
        reference, arrays["table"], arrays["sizes"], arrays["result"], options.precision
    )
    print("\n".join(lines))
    return int(not is_equal)
