"""``naflex-fast identify``: by which convention did a port resample its position embeddings?"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from ..measure.output import printable
from .checks import announce

FAMILIES = ("siglip2", "lfm2-vl", "moonvit", "qwen3-vl", "ovis2.5", "radio")
HOW_TO_GO_ON = """Next: the port resamples this table to these sizes and writes its tokens, one image after \
the other, as
`result` {shape} into R.safetensors; then naflex-fast identify --family {family} R.safetensors
The table is random. A trained one is smoother: there the same mistake makes a smaller difference."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the file and the family of models, whose convention is the reference."""
    parser.description = (
        "Name the convention that a port's position embeddings follow. Exit status 0: the "
        "reference's."
    )
    parser.add_argument(
        "file",
        metavar="FILE.safetensors",
        help="tensors: result (sum of t*h*w, C) or padded (B, N, C); table (H0, W0, C) and sizes "
        "(B, 2) or with frames (B, 3), without which they are the family's",
    )
    parser.add_argument(
        "--family",
        default="siglip2",
        metavar="NAME",
        choices=FAMILIES,
        help=f"the reference: {', '.join(FAMILIES)} (siglip2)",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the family's table and sizes into FILE, for the port to resample",
    )


def identify(options: argparse.Namespace) -> int:
    """Print the nearest convention in a sentence; return 0 if it is the reference, else 1.

    Raises:
        ValueError: a file that is no safetensors file, lacks a tensor, or holds what cannot be
            compared.
        OSError: the file cannot be read; or written, if that is asked for.
    """
    if options.write:
        with open(options.file, "xb") as file:  # never over what is there
            _write_example(file, options)
        return 0
    check_tensors(options.file)
    announce(f"comparing {printable(options.file)} with what is known ...")

    import torch
    from safetensors.torch import load_file

    from ..identify import FAMILIES, Convention, example_inputs, identify_resampling

    torch.set_num_threads(1)  # many small products: threads would wait for each other
    tensors = {**example_inputs(options.family), **load_file(options.file)}
    found = identify_resampling(tensors["table"], tensors["sizes"], tensors["result"])
    errors = {Convention(**settings): error for error, settings in found}
    reference = FAMILIES[options.family].convention
    if reference not in errors:
        raise ValueError(
            f"sizes must be multiples of {reference.merge}, the reference's blocks of tokens"
        )
    sentence, equal = _judge(errors, reference, tensors["result"])
    print(sentence)
    return 0 if equal else 1


def check_tensors(file: str) -> None:
    """Find out which tensors a file holds, without torch; table and sizes may both be missing.

    Raises:
        ValueError: no safetensors file, or one that lacks a tensor.
        OSError: the file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    if Path(file).is_dir():
        raise ValueError(f"{file} is a folder; valid: a safetensors file")
    try:
        with safe_open(file, "numpy") as opened:
            names = set(opened.keys())
    except SafetensorError as problem:
        raise ValueError(f"{file} is not a safetensors file: {problem}") from problem
    if not names & {"table", "sizes"}:
        names |= {"table", "sizes"}
    missing = [name for name in ("table", "sizes", "result") if name not in names]
    if missing:
        raise ValueError(
            f"{file} lacks {', '.join(missing)}; it must hold result, and table and sizes or "
            "neither"
        )


def _write_example(file: BinaryIO, options: argparse.Namespace) -> None:
    """Write the family's table and sizes, and print what the port has to do with them."""
    announce(f"writing {printable(options.file)} ...")
    from safetensors.torch import save

    from ..identify import example_inputs

    asked = example_inputs(options.family)
    table, sizes = asked["table"], asked["sizes"]
    file.write(save(asked))
    shape = (int(sizes.prod(1).sum()), table.shape[-1])
    print(f"{options.file}: table {tuple(table.shape)}, sizes {sizes.tolist()}")
    print(HOW_TO_GO_ON.format(shape=shape, family=options.family))


def _judge(errors: dict[Any, float], reference: Any, result: Any) -> tuple[str, bool]:
    """What the errors of all conventions tell, in a sentence, and whether it is the reference.

    Args:
        errors: by convention, the smallest first.
        reference: one of these conventions.
        result: the port's tokens.
    """
    from ..identify import DECIMALS, describe, tolerance

    rounding = tolerance(result)
    best = next(iter(errors))
    # Where others are no better, it is the reference; rounding of a half dtype decides nothing.
    enough = errors[best] + 10**-DECIMALS
    if result.element_size() < 4:
        enough = max(enough, rounding)
    if errors[reference] <= enough:
        best = reference
    error = errors[best]
    if error > rounding:
        nearest = describe(replace(best, bfloat16=None))
        return (
            f"no known convention; the nearest is {nearest}, {100 * error:.3g} % away; "
            f"the reference is {describe(reference)}"
        ), False
    rounded = [round(other, DECIMALS) for other in errors.values()]
    alike = rounded.count(round(error, DECIMALS)) - 1
    unsure = f"; on these sizes {alike} other conventions give the same" if alike else ""
    if best == reference:
        return (
            f"{describe(best)}: this is the reference (largest difference {error:.1e} of the "
            f"largest value){unsure}"
        ), True
    return (
        f"{describe(best)}; the reference is {describe(reference)}: embeddings differ by "
        f"{100 * errors[reference]:.3g} % of the largest value{unsure}"
    ), False
