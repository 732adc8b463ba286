"""The command ``naflex-fast drift``: options, and the way from them to a report. torch is imported when it runs."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from .. import images
from ..contenders import BASELINE, NAMES, OURS, check_names
from ..provenance import provenance
from ..style import require
from ..tables import check_writable, print_table, progress, write_json

PICTURES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options with which a model, its weights, images and what to measure are chosen."""
    add = parser.add_argument
    add("--model", metavar="NAME", help="timm NaFlexVit, e.g. naflexvit_base_patch16_siglip.v2_webli")
    add("--checkpoint", metavar="FILE", help="local weights (default: timm's pretrained ones)")
    add("--random-weights", action="store_true", help="measure the untrained model, as a stand-in")
    add("--images", metavar="DIR", help="folder of images (default: scikit-image's photos, cropped)")
    add("--max-seq-len", type=int, default=256, metavar="N", help="most patches per image (256)")
    add("--batch-size", type=int, default=16, metavar="B", help="images per batch (16)")
    add("--contenders", nargs="+", metavar="NAME", help=f"of {' '.join(NAMES)} (our {len(OURS)}; with --out all)")
    add("--strategies", nargs="+", metavar="NAME", dest="old_contenders", help=argparse.SUPPRESS)
    add("--dtype", default="float32", metavar="TYPE", help="cast the whole model to it (float32)")
    add("--json", metavar="FILE", help="also write the figures there")
    add("--out", metavar="DIR", help="also write report.json, report.md and report.html there")


def drift(options: argparse.Namespace, program: str = "naflex-fast") -> int:
    """Measure a named model on images, print the table and the verdict, write what was asked for.

    Raises:
        ValueError: an option that makes no sense, before a model is loaded.
        OSError: a folder of results that cannot be written, before a model is loaded.
    """
    if not options.model:
        raise ValueError("drift needs --model NAME, e.g. --model naflexvit_base_patch16_siglip.v2_webli")
    prepare(options)
    sources = images.image_sources(options.images) if options.images else images.photos()
    from ..models import load_model
    from .inputs import NaFlexImages

    random = options.random_weights
    model, weights = load_model(options.model, options.checkpoint, random_weights=random, dtype=options.dtype)
    batches = NaFlexImages(sources, model, options.max_seq_len, options.batch_size)
    source = f"folder {Path(options.images).resolve().name}" if options.images else images.PHOTOS_WORDS
    return measure_and_show(model, batches, options, weights=weights, source=source, program=program)


def prepare(options: argparse.Namespace) -> None:
    """Check what can be checked before anything is loaded, and set ``options.contenders`` to those that will run."""
    if options.old_contenders:
        print("--strategies is now called --contenders; the old name goes with the next release", file=sys.stderr)
        options.contenders = options.contenders or options.old_contenders
    options.contenders = check_names([BASELINE, *(options.contenders or (NAMES if options.out else OURS))])
    if options.out:
        require("matplotlib", "--out")
        require("jinja2", "--out")
        check_writable(folder=options.out)
    if options.json:
        check_writable(file=options.json)


def measure_and_show(
    model: Any, batches: Any, options: argparse.Namespace, *, weights: str, source: str, program: str
) -> int:
    """Measure ``batches`` (as ``survey`` takes them, with a length) under prepared options; print and write."""
    from ..contenders import missing
    from .report import Report, cells, columns, headline, record, settings, verdict, write
    from .survey import survey

    runs = [name for name in options.contenders if missing(name, model.embeds) is None]
    print(f"{len(runs)} contenders on {len(batches)} batches: {', '.join(runs)}", file=sys.stderr, flush=True)
    found = survey(
        model,
        batches,
        options.contenders,
        pictures=PICTURES if options.out else 0,
        after_pass=progress("measuring", len(runs) * len(batches)),
    )
    report = Report(
        model=options.model,
        weights=weights,
        stand_in=weights.startswith("stand-in"),
        source=source,
        skipped=list(getattr(batches, "skipped", [])),
        dtype=options.dtype,
        patch_size=model.embeds.patch_size[0],
        max_seq_len=options.max_seq_len,
        resampling=settings(model.embeds),
        survey=found,
        made=provenance(shlex.join([*program.split(), *options.arguments])),
    )
    for line in report.skipped:
        print(f"skipped, not readable as an image: {line}", file=sys.stderr)
    print(f"Drift from timm's own result: {report.model}; weights: {weights}; {found.images:,} images")
    print_table(["contender", *columns(found).values()], [[name, *cells(found, name)] for name in found.drift])
    for name, why in found.left_out.items():
        print(f"not measured: {name}, {why}")
    print(f"{headline(found)}\n{verdict(found, report.stand_in)}")
    if options.json:
        write_json(options.json, record(report))
    if options.out:
        print(f"written: {', '.join(map(str, write(report, options.out)))}")
    return 0
