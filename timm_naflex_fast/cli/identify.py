"""``naflex-fast identify``: by which convention did a port resample its position embeddings?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

NAMES = "siglip2, lfm2-vl, moonvit, qwen3-vl, ovis2.5, radio"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file and the family of models."""
    parser.description = "Name the convention that a port's position embeddings follow. Exit status 0: the reference's."
    holds = "tensors: result (sum of t*h*w, C) or padded (B, N, C); table (H0, W0, C) and sizes (B, 2) or with frames "
    holds += "(B, 3), without which they are the family's"
    parser.add_argument("file", metavar="FILE.safetensors", help=holds)
    parser.add_argument("--family", default="siglip2", metavar="NAME", help=f"the reference: {NAMES} (siglip2)")
    writes = "write the family's table and sizes into FILE, for the port to resample"
    parser.add_argument("--write", action="store_true", help=writes)


def identify(options: argparse.Namespace) -> int:
    """Print the nearest convention in a sentence; return 0 if it is the reference, else 1.

    Raises:
        ValueError: a file that is no safetensors file, lacks a tensor, or holds what cannot be compared.
    """
    import torch
    from safetensors.torch import save

    from ..identify import FAMILIES, TIE, Convention, identify_resampling, question, tolerance, words

    torch.set_num_threads(1)  # many small products: threads would wait for each other
    asked = question(options.family)
    if options.write:
        Path(options.file).write_bytes(save(asked))
        print(f"{options.file}: table {tuple(asked['table'].shape)}, sizes {asked['sizes'].tolist()}")
        return 0
    tensors = _read(options.file, asked)
    result, reference = tensors["result"], FAMILIES[options.family].convention
    found = identify_resampling(tensors["table"], tensors["sizes"], result)
    known = {Convention(**settings): error for error, settings in found}
    if reference not in known:
        raise ValueError(f"every size must be a multiple of {reference.merge}, the blocks' side in {options.family}")
    best, error = next(iter(known.items()))  # they are sorted by their errors
    off, rounding = known[reference], tolerance(result)
    if off <= max(error + 10**-TIE, rounding if result.element_size() < 4 else 0):
        best, error = reference, off
    if error > rounding:
        nearest = f"no known convention; the nearest is {words(best)}, {100 * error:.3g} % away"
        print(f"{nearest}; the reference is {words(reference)}")
        return 1
    alike = sum(round(other, TIE) == round(error, TIE) for other in known.values()) - 1
    unsure = f"; on these sizes {alike} other conventions give the same" if alike else ""
    if best == reference:
        print(f"{words(best)}: this is the reference (largest difference {error:.1e} of the largest value){unsure}")
        return 0
    print(f"{words(best)}; the reference is {words(reference)}: embeddings differ by {100 * off:.3g} %{unsure}")
    return 1


def _read(file: str, asked: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file; table and sizes are those ``asked`` for, where it holds neither."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not Path(file).is_file():
        raise ValueError(f"{file}: No such file")
    try:
        tensors = load_file(file)
    except SafetensorError as problem:
        raise ValueError(f"{file} is not a safetensors file: {problem}") from problem
    if not {"table", "sizes"} & tensors.keys():
        tensors |= asked
    if missing := [name for name in ("table", "sizes", "result") if name not in tensors]:
        raise ValueError(f"{file} lacks {', '.join(missing)}; it must hold result, and table and sizes or neither")
    return tensors
