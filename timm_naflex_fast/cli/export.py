"""The command ``naflex-fast export``: options, and the way from them to a verified file."""

import argparse
from pathlib import Path

from ..measure.models import add_model_arguments, load_model
from ..measure.output import check_writable, positive, printable, progress
from ..text_table import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_model_arguments(parser)
    parser.add_argument("--out", required=True, metavar="FILE", help="model.onnx or model.pt2")
    size = "export for plain images of this size, in pixels; default: for NaFlex batches of any grids and lengths"
    parser.add_argument("--size", nargs=2, type=positive, metavar=("H", "W"), help=size)


def export(options: argparse.Namespace) -> int:
    """Export a named model, verify the file in every runtime that is installed, print what was
    found.

    Raises:
        ValueError: no model, an unknown suffix, or a size that the patches do not fill; before the
            work.
        RuntimeError: a package that the file's format needs is not installed; before the work.
        OSError: ``--out`` cannot be written; before the work.
    """
    out = Path(options.out)
    check_writable(out)
    from ..measure import export as work

    runtimes = work.runtimes_for(out)
    settings = dict(options.model_kwargs) | dict(random_weights=options.random_weights)
    model, weights = load_model(options.model, options.checkpoint, **settings)
    patch = tuple(model.embeds.patch_size)
    if options.size and (options.size[0] % patch[0] or options.size[1] % patch[1]):
        raise ValueError(
            f"--size must be a multiple of the model's patches, {patch[0]} x {patch[1]}"
        )
    with progress("exporting", 2 + len(runtimes)) as bar:
        differences, inputs, right = work.export(model, out, options.size, bar.update)
    print(f"{options.model}; weights: {weights}")
    print(
        f"Compared with timm's own code on batches not seen at export; right: at most {work.TOLERANCE:g} of the largest"
    )
    words = {True: "right", False: "wrong"}
    rows = differences.items()
    print(
        table(
            [
                {"runtime": n, "largest difference": f"{d:.1e}", "": words[d <= work.TOLERANCE]}
                for n, d in rows
            ]
        )
    )
    if not right:
        print(f"not written: {printable(out)}")
        return 1
    print(f"written: {printable(out)}")
    for name, shape in inputs.items():
        print(f"  {name}: {shape}")
    print(work.how_to_run(out, list(inputs)))
    return 0
