"""``naflex-fast identify``: by which convention did a port resample its position embeddings?"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file, and the options that describe the reference (SigLIP-2's without options)."""
    parser.description = (
        "Name the convention that a port's position embeddings follow. Exit status 0: the reference; 1: another one."
    )
    parser.add_argument(
        "file",
        metavar="FILE.safetensors",
        help="tensors: table (H0, W0, C), sizes (h, w) or (B, 2), result (sum of h*w, C)",
    )
    parser.add_argument(
        "--mode", choices=("bilinear", "bicubic"), default="bilinear", help="the reference's (bilinear)"
    )
    parser.add_argument("--no-antialias", action="store_true", help="the reference has no antialiasing")
    parser.add_argument("--align-corners", action="store_true", help="the reference aligns corners")
    parser.add_argument("--ar-preserving", action="store_true", help="the reference resizes to a square and cuts it")
    parser.add_argument("--merge", type=int, default=1, metavar="M", help="the reference's blocks of M x M tokens (1)")


def identify(options: argparse.Namespace) -> int:
    """Print the nearest convention in a sentence; return 0 if it is the reference, else 1.

    Raises:
        ValueError: a file that is no safetensors file, lacks a tensor, or holds shapes that do not fit.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from ..resampling.identify import Convention, identify_resampling, tolerance, words

    torch.set_num_threads(1)  # many small products: threads would wait for each other
    try:
        tensors = load_file(options.file)
    except SafetensorError as problem:
        raise ValueError(f"{options.file} is not a safetensors file: {problem}") from problem
    if missing := [name for name in ("table", "sizes", "result") if name not in tensors]:
        raise ValueError(f"{options.file} lacks {', '.join(missing)}; it must hold table, sizes and result")
    result = tensors["result"]
    found = identify_resampling(tensors["table"], tensors["sizes"], result)
    antialias = not options.no_antialias
    reference = Convention(
        options.mode,
        antialias,
        options.align_corners,
        not options.align_corners,
        options.ar_preserving,
        None if options.mode == "bilinear" else -0.5 if antialias else -0.75,
        merge=options.merge,
    )
    known = {Convention(**settings): error for error, settings in found}
    if reference not in known:
        raise ValueError(f"--merge {options.merge} does not divide every size, or is not 1, 2, 3 or 4")
    error, best = found[0]
    off, expected = known[reference], words(vars(reference))
    if off <= max(error + 1e-9, tolerance(result) if result.element_size() < 4 else 0):
        best, error = vars(reference), off
    if error > tolerance(result):
        print(f"no known convention; the nearest is {words(best)}, {_percent(error)} away; the reference is {expected}")
        return 1
    if best == vars(reference):
        print(f"{expected}: this is the reference (largest difference {error:.1e} of the largest value)")
        return 0
    print(f"{words(best)}; the reference is {expected}: embeddings differ by {_percent(off)}")
    return 1


def _percent(error: float) -> str:
    return f"{100 * error:.3g} %"
