"""The command ``naflex-fast drift``: options, and the way from them to a report."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...patching.modes import POS_EMBED
from ..bench.report import provenance
from . import photos, plots
from .data import Report, write_json
from .html import write_html
from .inputs import DTYPES, ImageFolder, NaFlexImages, load_model
from .markdown import write_markdown
from .measure import survey
from .peers import NAMES, settings
from .report import print_table, track
from .report import write_json as write_figures

PICTURES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options with which a model, its weights, images and what to measure are chosen."""
    parser.add_argument("--model", metavar="NAME", help="timm NaFlexVit, e.g. naflexvit_base_patch16_siglip.v2_webli")
    parser.add_argument("--checkpoint", metavar="FILE", help="local weights (default: timm's pretrained ones)")
    parser.add_argument("--random-weights", action="store_true", help="measure the untrained model, as a stand-in")
    parser.add_argument("--images", metavar="DIR", help="folder of images (default: scikit-image's photos, cropped)")
    parser.add_argument(
        "--max-seq-len",
        type=int,
        nargs="+",
        default=[256],
        metavar="N",
        help="most patches per image (256); of several, every image is measured at each",
    )
    parser.add_argument("--patch-size", type=int, metavar="P", help="resample the patch kernels to P x P pixels")
    parser.add_argument("--batch-size", type=int, default=16, metavar="B", help="images per batch (16)")
    parser.add_argument(
        "--strategies",
        nargs="+",
        choices=NAMES,
        metavar="NAME",
        help=f"what to measure, of {', '.join(NAMES)} (the first {len(POS_EMBED)}; with --out all)",
    )
    parser.add_argument("--baseline", default="stock", choices=NAMES, metavar="NAME", help="compare with it (stock)")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="cast the whole model to it (float32)")
    parser.add_argument("--json", metavar="FILE", help="also write the table's figures there")
    parser.add_argument("--out", metavar="DIR", help="also write report.json, report.md and report.html there")


def drift(options: argparse.Namespace, program: str = "naflex-fast") -> int:
    """Measure a named model on images, print the table and the verdict, write what was asked for."""
    if not options.model:
        raise ValueError("drift needs --model NAME, e.g. --model naflexvit_base_patch16_siglip.v2_webli")
    if options.out:
        plots.require()
    if options.images and not Path(options.images).is_dir():
        raise ValueError(f"{options.images} is not a folder")  # before a model is loaded for nothing
    sources = [] if options.images else photos.photos()
    model, weights = load_model(
        options.model,
        options.checkpoint,
        random_weights=options.random_weights,
        dtype=options.dtype,
        patch_size=options.patch_size,
    )
    how: tuple[Any, ...] = (model, options.max_seq_len, options.batch_size, options.patch_size)
    images = ImageFolder(options.images, *how) if options.images else NaFlexImages(sources, *how)
    source = f"folder {Path(options.images).resolve().name}" if options.images else photos.WORDS
    return measure_and_show(model, images, options, weights=weights, source=source, program=program)


def measure_and_show(
    model: nn.Module,
    batches: Iterable[tuple[dict[str, Tensor], Tensor | None]],
    options: argparse.Namespace,
    *,
    weights: str,
    source: str,
    program: str,
    max_seq_len: list[int] | None = None,
) -> int:
    """Measure ``batches`` (with a length) under the options; print and write."""
    names = options.strategies or (NAMES if options.out else POS_EMBED)
    bar = track(batches, "measuring", len(batches))  # type: ignore[arg-type]
    found = survey(model, bar, names, baseline=options.baseline, pictures=PICTURES if options.out else 0)
    embeds: Any = model.embeds
    report = Report(
        model=options.model,
        weights=weights,
        stand_in=weights.startswith("stand-in"),
        source=source,
        skipped=list(getattr(batches, "skipped", [])),
        dtype=options.dtype,
        patch_size=options.patch_size or embeds.patch_size[0],
        max_seq_len=max_seq_len or options.max_seq_len,
        resampling=settings(embeds),
        survey=found,
        made=provenance(shlex.join([*program.split(), *options.arguments])),
    )
    for line in report.skipped:
        print(f"skipped, not readable as an image: {line}", file=sys.stderr)
    about: dict[str, Any] = dict(model=report.model, weights=weights, images=found.images)
    print_table(found.drift, **about, baseline=found.baseline)
    for name, why in found.left_out.items():
        print(f"not measured: {name}, {why}")
    print(report.verdict)
    if options.json:
        write_figures(options.json, found.drift, **about)
    if options.out:
        write(report, options.out)
        print(f"written: {', '.join(str(Path(options.out) / name) for name in FILES)}")
    return 0


FILES = {"report.json": write_json, "report.md": write_markdown, "report.html": write_html}


def write(report: Report, folder: str | Path) -> None:
    """Write the report in every form into ``folder``, which is made.

    Raises:
        RuntimeError: matplotlib, which draws the plots, is not installed.
    """
    plots.require()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, write_file in FILES.items():
        write_file(folder / name, report)
