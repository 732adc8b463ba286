"""``naflex-fast identify``: by which convention did a port resample its position embeddings?"""

import argparse
from typing import Any

from ..measure.output import printable
from .checks import announce

NEEDED = ("table", "sizes", "result")
POSITIONS_IN_FLOAT32 = 2e-4  # the largest error that their rounding explains
EXACT = 1e-9  # conventions that agree on these sizes differ by less
# Settings of ``identify.Convention``, here where torch need not be imported for their names.
_SIGLIP2 = dict(mode="bilinear", cubic_coefficient=None)
_BILINEAR = dict(mode="bilinear", cubic_coefficient=None, antialias=False)
_BICUBIC = dict(mode="bicubic", cubic_coefficient=-0.75, antialias=False)
FAMILIES: dict[str, dict[str, Any]] = {  # the models that share a vision tower
    "siglip2": _SIGLIP2,  # NaFlex
    "lfm2-vl": _SIGLIP2,
    "moonvit": _BICUBIC,  # Kimi-VL, Kimi-K2.5
    "qwen3-vl": dict(**_BILINEAR, align_corners=True, positions="corners", merge=2),
    "ovis2.5": dict(**_BICUBIC, merge=2),
    "radio": dict(**_BILINEAR, ar_preserving=True),
}
"""Tests compare each with the original library's own code, where it is installed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file and the family of models, whose convention is the reference."""
    parser.description = (
        "Name the convention that a port's position embeddings follow. Exit status 0: the "
        "reference's."
    )
    parser.add_argument(
        "file",
        metavar="FILE.safetensors",
        help="tensors: table (H0, W0, C), sizes (B, 2) or with frames (B, 3), and what the port "
        "made of them: result (sum of t*h*w, C) or padded (B, N, C)",
    )
    parser.add_argument(
        "--family",
        default="siglip2",
        metavar="NAME",
        choices=FAMILIES,
        help=f"the reference: {', '.join(FAMILIES)} (siglip2)",
    )


def identify(options: argparse.Namespace) -> int:
    """Print the nearest conventions; return 0 if the port follows the reference, else 1.

    Raises:
        ValueError: a file that is no safetensors file, lacks a tensor, or holds what cannot be
            compared.
        OSError: the file cannot be read.
    """
    check_tensors(options.file)
    announce(f"comparing {printable(options.file)} with what is known ...")

    import torch
    from safetensors.torch import load_file

    from ..recordings.conventions import Convention
    from ..recordings.identify import identify_resampling

    torch.set_num_threads(1)  # many small products: threads would wait for each other
    tensors = load_file(options.file)
    found = identify_resampling(*(tensors[name] for name in NEEDED))
    reference = Convention(**FAMILIES[options.family])._asdict()
    rounding = 2 * torch.finfo(tensors["result"].dtype).eps
    return int(not _tell(found, reference, rounding))


def _tell(
    found: list[tuple[float, dict[str, Any]]], reference: dict[str, Any], rounding: float
) -> bool:
    """Print the errors of the reference and of the nearest conventions, and return if it is equal.

    Args:
        found: errors and conventions, the smallest error first.
        reference: the convention that is expected.
        rounding: the largest error that the result's dtype explains.

    Raises:
        ValueError: sizes that the reference does not allow.
    """
    expected = [error for error, settings in found if settings == reference]
    if not expected:
        raise ValueError(f"sizes must be multiples of the reference's merge, {reference['merge']}")
    # Where no other is nearer, it is the reference. Rounding of a half dtype decides nothing.
    nearest = min(found[0][0] + EXACT, POSITIONS_IN_FLOAT32)
    is_equal = expected[0] <= max(nearest, rounding)
    verdict = "equal to" if is_equal else "different from"
    print(f"{verdict} the reference: {100 * expected[0]:.3g} % of the largest value. The nearest:")
    for error, settings in found[:3]:
        print(f"{100 * error:10.3g} %  {_differences(settings, reference)}")
    return is_equal


def _differences(settings: dict[str, Any], reference: dict[str, Any]) -> str:
    """The settings that are not those of the reference."""
    differences = []
    for name, value in settings.items():
        if value != reference[name]:
            differences.append(f"{name}={value} (not {reference[name]})")
    return ", ".join(differences) or "the reference"


def check_tensors(file: str) -> None:
    """Find out whether a file holds the tensors, without torch.

    Raises:
        ValueError: no safetensors file, or one that lacks a tensor.
        OSError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    open(file, "rb").close()  # of a folder, safetensors would say less
    try:
        with safe_open(file, "numpy") as opened:
            for name in NEEDED:
                opened.get_slice(name)
    except SafetensorError as problem:
        raise ValueError(f"{file}: {problem}") from problem
