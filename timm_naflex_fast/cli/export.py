"""``naflex-fast export``: its options, and the way from them to a verified file."""

import argparse
from importlib.util import find_spec
from pathlib import Path

from ..measure.models import add_model_arguments, load_model
from ..measure.output import check_writable, positive, printable
from ..text_table import table
from .checks import announce, check_model_options

# The runtimes that run a file with this suffix, and the module of each.
RUNTIMES = {
    ".pt2": {"torch.export": "torch"},
    ".onnx": {"torch.export": "torch", "ONNX Runtime": "onnxruntime", "OpenVINO": "openvino"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_model_arguments(parser)
    parser.add_argument("--out", required=True, metavar="FILE", help="model.onnx or model.pt2")
    parser.add_argument(
        "--size",
        nargs=2,
        type=positive,
        metavar=("H", "W"),
        help="export for plain images of this size, in pixels; default: for NaFlex batches of any "
        "grids and lengths",
    )


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
    check_model_options(options)
    runtimes = runtimes_for(out)
    check_writable(out)
    announce(f"loading {options.model} ...")
    from ..measure import export as work

    model, weights = load_model(
        options.model,
        options.checkpoint,
        **dict(options.model_kwargs),
        random_weights=options.random_weights,
    )
    high, wide = model.embeds.patch_size
    if options.size and (options.size[0] % high or options.size[1] % wide):
        raise ValueError(f"--size must be a multiple of the model's patches, {high} x {wide}")
    announce(f"exporting, then comparing in {', '.join(runtimes)} ...")
    found = work.export(model, out, runtimes, options.size)
    print(f"{options.model}; weights: {weights}")
    print("The largest differences from timm's own code, relative, on batches not seen at export:")
    lines = []
    for runtime, differences in found.differences.items():
        line = {part: f"{off:.1e}" for part, off in differences.items()}
        verdict = "right" if work.is_right(differences) else "wrong"
        lines.append({"runtime": runtime, **line, "": verdict})
    print(table(lines))
    print(f"dtypes: {', '.join(found.dtypes)}")
    if "float64" in found.dtypes:
        print("TensorRT, Core ML and WebGPU have no float64, and will refuse it")
    if not found.right:
        print(f"not written: {printable(out)}")
        return 1
    print(f"written: {printable(out)}")
    print(work.how_to_run(out, found.inputs))
    return 0


def runtimes_for(out: Path) -> list[str]:
    """The runtimes here that can run such a file.

    Raises:
        ValueError: a suffix that is not known.
        RuntimeError: what writes such files is not installed.
    """
    if out.suffix not in RUNTIMES:
        raise ValueError(f"--out must end with .onnx or .pt2; got {out.name}")
    if out.suffix == ".onnx" and find_spec("onnxscript") is None:
        raise RuntimeError(".onnx files need onnxscript: pip install onnxscript")
    return [runtime for runtime, module in RUNTIMES[out.suffix].items() if find_spec(module)]
