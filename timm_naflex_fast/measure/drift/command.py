"""The command ``naflex-fast drift``: options, and the way from them to a report. torch is imported when it runs."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import images
from ..contenders import NAMES, OURS, check_names
from ..provenance import provenance
from ..style import require_matplotlib
from ..tables import check_writable, print_table, progress, write_json

if TYPE_CHECKING:
    from torch import nn

    from .report import Report

DTYPES = ("float32", "bfloat16", "float16")
PICTURES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options with which a model, its weights, images and what to measure are chosen."""
    add = parser.add_argument
    add("--model", metavar="NAME", help="timm NaFlexVit, e.g. naflexvit_base_patch16_siglip.v2_webli")
    add("--checkpoint", metavar="FILE", help="local weights (default: timm's pretrained ones)")
    add("--random-weights", action="store_true", help="measure the untrained model, as a stand-in")
    add("--images", metavar="DIR", help="folder of images (default: scikit-image's photos, cropped)")
    add(
        "--max-seq-len",
        type=int,
        nargs="+",
        default=[256],
        metavar="N",
        help="most patches per image (256), or several",
    )
    add("--patch-size", type=int, metavar="P", help="resample the patch kernels to P x P pixels")
    add("--batch-size", type=int, default=16, metavar="B", help="images per batch (16)")
    add("--contenders", nargs="+", metavar="NAME", help=f"of {' '.join(NAMES)} (our {len(OURS)}; with --out all)")
    add("--strategies", nargs="+", help=argparse.SUPPRESS)  # the name before 0.2
    add("--baseline", default="stock", metavar="NAME", help="compare with this contender (stock)")
    add("--dtype", default="float32", choices=DTYPES, help="cast the whole model to it (float32)")
    add("--json", metavar="FILE", help="also write the table's figures there")
    add("--out", metavar="DIR", help="also write report.json, report.md and report.html there")


def drift(options: argparse.Namespace, program: str = "naflex-fast") -> int:
    """Measure a named model on images, print the table and the verdict, write what was asked for.

    Raises:
        ValueError: an option that makes no sense, before a model is loaded.
        OSError: a file or folder of results that cannot be written, before a model is loaded.
    """
    if not options.model:
        raise ValueError("drift needs --model NAME, e.g. --model naflexvit_base_patch16_siglip.v2_webli")
    prepare(options)
    sources = images.image_sources(options.images) if options.images else images.photos()
    from .inputs import NaFlexImages, load_model

    model, weights = load_model(
        options.model,
        options.checkpoint,
        random_weights=options.random_weights,
        dtype=options.dtype,
        patch_size=options.patch_size,
    )
    batches = NaFlexImages(sources, model, options.max_seq_len, options.batch_size, options.patch_size)
    source = f"folder {Path(options.images).resolve().name}" if options.images else images.PHOTOS_WORDS
    return measure_and_show(model, batches, options, weights=weights, source=source, program=program)


def prepare(options: argparse.Namespace) -> None:
    """Check what can be checked before anything is loaded, and set ``options.contenders`` to those that will run."""
    if options.strategies:
        print("--strategies is now called --contenders", file=sys.stderr)
    names = options.contenders or options.strategies or (NAMES if options.out else OURS)
    options.baseline, *_ = options.contenders = check_names([options.baseline, *names])
    if options.out:
        require_matplotlib("--out")
    check_writable(file=options.json, folder=options.out)


def measure_and_show(
    model: nn.Module,
    batches: Any,
    options: argparse.Namespace,
    *,
    weights: str,
    source: str,
    program: str,
) -> int:
    """Measure ``batches`` (as ``survey`` takes them, with a length) under prepared options; print and write."""
    from ..contenders import missing
    from .report import Report, headline, settings, verdict, write
    from .survey import survey

    embeds: Any = model.embeds
    runs = [name for name in options.contenders if missing(name, embeds) is None]
    with _clock(runs, len(batches), options) as after_pass:
        found = survey(
            model,
            batches,
            options.contenders[1:],
            baseline=options.baseline,
            pictures=PICTURES if options.out else 0,
            after_pass=after_pass,
        )
    report = Report(
        model=options.model,
        weights=weights,
        stand_in=weights.startswith("stand-in"),
        source=source,
        skipped=list(getattr(batches, "skipped", [])),
        dtype=options.dtype,
        patch_size=options.patch_size or embeds.patch_size[0],
        max_seq_len=options.max_seq_len,
        resampling=settings(embeds),
        survey=found,
        made=provenance(shlex.join([*program.split(), *options.arguments])),
    )
    for line in report.skipped:
        print(f"skipped, not readable as an image: {line}", file=sys.stderr)
    _print(report)
    print(f"{headline(found)}\n{verdict(found, report.stand_in)}")
    if options.json:
        from dataclasses import asdict

        figures = {name: asdict(one) for name, one in found.drift.items()}
        write_json(options.json, dict(model=report.model, weights=weights, images=found.images, contenders=figures))
    if options.out:
        print(f"written: {', '.join(map(str, write(report, options.out)))}")
    return 0


@contextmanager
def _clock(runs: list[str], batches: int, options: argparse.Namespace) -> Iterator[Callable[[], None]]:
    """Say how many contenders run and, after the first pass, about how long; yields what is called after each pass."""
    say = bool(options.out)
    if say:
        print(f"{len(runs)} contenders on {batches} batches: {', '.join(runs)}", file=sys.stderr, flush=True)
    started = time.monotonic()
    with progress("measuring", len(runs) * batches) as advance:

        def after_pass() -> None:
            nonlocal say
            if say:
                # Batches of more patches take longer: the first one has the first length.
                lengths = options.max_seq_len
                longer = sum(lengths) / len(lengths) / lengths[0]
                minutes = (time.monotonic() - started) * longer * len(runs) * batches / 60
                print(f"this takes about {minutes:.1f} minutes", file=sys.stderr, flush=True)
                say = False
            advance()

        yield after_pass


def _print(report: Report) -> None:
    from .report import cells, columns

    found = report.survey
    origin = "timm's own result" if found.baseline == "stock" else found.baseline
    print(f"Drift from {origin}: {report.model}; weights: {report.weights}; {found.images:,} images")
    print_table(["contender", *columns(found).values()], [[name, *cells(found, name)] for name in found.drift], 130)
    for name, why in found.left_out.items():
        print(f"not measured: {name}, {why}")
