"""``naflex-fast identify``: by which convention did a port resample its position embeddings?"""

import argparse
from typing import Any

KNOWN = "siglip2, lfm2-vl, moonvit, qwen3-vl, ovis2.5, radio"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file and the family of models, whose convention is the reference."""
    parser.description = "Name the convention that a port's position embeddings follow. Exit status 0: the reference's."
    holds = "tensors: result (sum of t*h*w, C) or padded (B, N, C); table (H0, W0, C) and sizes (B, 2) or with frames "
    holds += "(B, 3), without which they are the family's"
    parser.add_argument("file", metavar="FILE.safetensors", help=holds)
    parser.add_argument(
        "--family", default="siglip2", metavar="NAME", help=f"the reference: {KNOWN} (siglip2)"
    )
    writes = "write the family's table and sizes into FILE, for the port to resample"
    parser.add_argument("--write", action="store_true", help=writes)


def identify(options: argparse.Namespace) -> int:
    """Print the nearest convention in a sentence; return 0 if it is the reference, else 1.

    Raises:
        ValueError: a file that is no safetensors file, lacks a tensor, or holds what cannot be
            compared.
    """
    from dataclasses import replace

    import torch
    from safetensors.torch import save

    from ..identify import (
        DECIMALS,
        FAMILIES,
        Convention,
        describe,
        example_inputs,
        identify_resampling,
        tolerance,
    )

    torch.set_num_threads(1)  # many small products: threads would wait for each other
    asked = example_inputs(options.family)
    if options.write:
        with open(options.file, "xb") as file:  # never over what is there
            file.write(save(asked))
        shape = f"({asked['sizes'].prod(1).sum()}, {asked['table'].shape[-1]})"
        print(
            f"{options.file}: table {tuple(asked['table'].shape)}, sizes {asked['sizes'].tolist()}\n"
            "Next: the port resamples this table to these sizes and writes its tokens, one image after the other, as\n"
            f"`result` {shape} into R.safetensors; then naflex-fast identify --family {options.family} R.safetensors"
        )
        return 0
    tensors = _read(options.file, asked)
    result, reference = tensors["result"], FAMILIES[options.family].convention
    found = identify_resampling(tensors["table"], tensors["sizes"], result)
    known = {Convention(**settings): error for error, settings in found}
    if reference not in known:
        raise ValueError(
            f"sizes must be multiples of {reference.merge}, the reference's blocks of tokens"
        )
    best, error = next(iter(known.items()))  # they are sorted by their errors
    off, rounding = known[reference], tolerance(result)
    if off <= max(error + 10**-DECIMALS, rounding if result.element_size() < 4 else 0):
        best, error = reference, off
    synthetic = ""
    if torch.equal(tensors["table"], asked["table"]):
        synthetic = " of this random table; a trained table is smoother, and differs less"
    if error > rounding:
        nearest = f"{describe(replace(best, bfloat16=None))}, {100 * error:.3g} % away{synthetic}"
        print(
            f"no known convention; the nearest is {nearest}; the reference is {describe(reference)}"
        )
        return 1
    alike = sum(round(other, DECIMALS) == round(error, DECIMALS) for other in known.values()) - 1
    unsure = f"; on these sizes {alike} other conventions give the same" if alike else ""
    if best == reference:
        print(
            f"{describe(best)}: this is the reference (largest difference {error:.1e} of the largest value){unsure}"
        )
        return 0
    differ = f"embeddings differ by {100 * off:.3g} % of the largest value{synthetic}"
    print(f"{describe(best)}; the reference is {describe(reference)}: {differ}{unsure}")
    return 1


def _read(file: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The tensors of a file; table and sizes are those ``asked`` for, where it holds neither."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except SafetensorError as problem:
        raise ValueError(f"{file} is not a safetensors file: {problem}") from problem
    if not {"table", "sizes"} & tensors.keys():
        tensors |= asked
    if missing := [name for name in ("table", "sizes", "result") if name not in tensors]:
        raise ValueError(
            f"{file} lacks {', '.join(missing)}; it must hold result, and table and sizes or neither"
        )
    return tensors
