"""``naflex-fast export``: its options, and the way from them to a verified file."""

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ... import __version__
from ...pictures import settings_of
from ...text_table import table
from ..measure.models import add_model_arguments, fingerprint
from ..measure.output import check_writable, marked, positive, printable, provenance, require
from .checks import announce, check_model_options, load_as_chosen

EPILOG = (
    "Exports the mode matmul. ONNX files need the extra [export] of this package. Without --checkpoint "
    "and --random-weights timm downloads the pretrained weights. Exit status: 0 the file is written "
    "and right in each runtime that is installed, in float32; 1 a runtime is wrong, nothing is "
    "written; 2 an error."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.epilog = EPILOG
    add_model_arguments(parser)
    parser.add_argument("--out", required=True, metavar="FILE", help="model.onnx or model.pt2")
    parser.add_argument(
        "--size",
        nargs=2,
        type=positive,
        metavar=("H", "W"),
        help="export for plain images of this size, in pixels (NaFlex batches of any grids and "
        "lengths)",
    )
    parser.add_argument(
        "--max-seq-len",
        type=positive,
        default=256,
        help="most patches per image, kept in the file for those who prepare images; it runs with "
        "any number (256)",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write what was found there; -: to stdout",
    )


def action(options: argparse.Namespace) -> int:
    """Export a named model, verify the file in every runtime that is installed, print what was
    found.

    Raises:
        ValueError: no model, an unknown suffix, or a path that is not UTF-8, before the model is
            loaded; a size that the patches do not fill, before the work.
        RuntimeError: a package that the file's format needs is not installed; before the work.
        OSError: ``--out`` or ``--json`` cannot be written; before the work.
    """
    out = Path(options.out)
    check_model_options(options)
    runtimes = runtimes_for(out)
    check_writable(out)
    model, weights = load_as_chosen(options)
    import timm
    import torch

    from ..measure import export as work

    high, wide = model.embeds.patch_size
    if options.size and (options.size[0] % high or options.size[1] % wide):
        raise ValueError(f"--size must be a multiple of the model's patches, {high} x {wide}")
    metadata = {
        "model": options.model,
        "weights": weights,
        "weights_sha256": fingerprint(model),
        "timm_naflex_fast": __version__,
        "timm": timm.__version__,
        "torch": torch.__version__,
        **settings_of(model),
    }
    # Plain images of one size have no choice of it.
    if options.size is None:
        metadata["max_seq_len"] = str(options.max_seq_len)
    announce(f"exporting, then comparing in {', '.join(runtimes)} ...")
    checks, is_right = work.export(model, out, runtimes, options.size, metadata)
    file = printable(out)
    options.figures.update(
        provenance(options.command), file=file, metadata=metadata, checks=checks, written=is_right
    )
    print(f"{options.model}; weights: {weights}")
    _show(checks)
    if not is_right:
        print(f"not written: {file}")
        return 1
    print(f"written: {file}")
    return 0


def _show(checks: Sequence[dict[str, Any]]) -> None:
    """Print how far each runtime is from timm."""
    print(
        "The largest differences from timm's own code, relative, on batches not seen at export, in "
        "float32 (to which OpenVINO must be set):"
    )
    lines = []
    for check in checks:
        found = check["differences"]
        verdict = "✓ right" if check["right"] else "✗ wrong"
        if check["right"] and found["model"] is None:
            verdict = "no answer: every picture gives the same, a wrong file would give it too"
        off = {part: "-" if one is None else f"{one:.1e}" for part, one in found.items()}
        lines.append({"runtime": check["runtime"], **off, "": verdict})
    print(marked(table(lines)))


def runtimes_for(out: Path) -> list[str]:
    """The runtimes here that can run such a file.

    Raises:
        ValueError: a suffix that is not known, or a path that is not UTF-8.
        RuntimeError: what writes such files is not installed; names all that is missing.
    """
    try:
        str(out.resolve()).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the path of --out must be UTF-8, which is all that the runtimes take; got "
            f"{printable(out)} (in a C locale set PYTHONUTF8=1)"
        ) from error
    if out.suffix == ".pt2":
        return ["torch.export"]
    if out.suffix != ".onnx":
        raise ValueError(f"--out must end with .onnx or .pt2; got {out.name}")
    require("an .onnx file", "onnx", "onnxscript", "onnxruntime")
    # The first runs the program from which the file is made: so it is known which of both is wrong.
    runtimes = ["torch.export", "ONNX Runtime"]
    if find_spec("openvino"):
        runtimes.append("OpenVINO")
    return runtimes
