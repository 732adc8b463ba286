"""``naflex-fast identify``: by which convention did a port resample its position embeddings?"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file, and the options that describe the reference (SigLIP-2's without options)."""
    parser.description = "Name the convention that a port's position embeddings follow. Exit status 0: the reference's."
    holds = "tensors: table (H0, W0, C), sizes (B, 2) or with frames (B, 3), result (sum of t*h*w, C)"
    parser.add_argument("file", metavar="FILE.safetensors", help=holds)
    modes = ("bilinear", "bicubic")
    parser.add_argument("--mode", choices=modes, default="bilinear", help="the reference's (bilinear)")
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

    from ..identify import TIE, Convention, identify_resampling, tolerance, words

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
    best, error = next(iter(known.items()))  # they are sorted by their errors
    off, rounding = known[reference], tolerance(result)
    if off <= max(error + 10**-TIE, rounding if result.element_size() < 4 else 0):
        best, error = reference, off
    if error > rounding:
        nearest = f"no known convention; the nearest is {words(best)}, {100 * error:.3g} % away"
        print(f"{nearest}; the reference is {words(reference)}")
        return 1
    if best == reference:
        print(f"{words(best)}: this is the reference (largest difference {error:.1e} of the largest value)")
        return 0
    print(f"{words(best)}; the reference is {words(reference)}: embeddings differ by {100 * off:.3g} %")
    return 1
