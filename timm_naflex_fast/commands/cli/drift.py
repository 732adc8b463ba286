"""``naflex-fast drift``: its options, and the way from them to a report."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...pictures import settings_of
from ...text_table import table
from ..measure import images
from ..measure.models import add_model_arguments
from ..measure.output import marked, positive, printable, provenance, require
from .checks import announce_skipped, check_model_options, load_as_chosen

BATCH = 16  # images


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options with which a model, its weights, images and what to measure are chosen."""
    parser.epilog = (
        "Without --checkpoint and --random-weights timm downloads the pretrained weights. "
        "Exit status: 0 if everything was measured, 2 if nothing could be."
    )
    add_model_arguments(parser)
    add = parser.add_argument
    add("--images", metavar="DIR", help="folder of images (scikit-image's photos, cropped)")
    add(
        "--max-seq-len",
        type=positive,
        default=256,
        help="most patches per image (256)",
    )
    add("--json", metavar="FILE", help="also write the figures there; -: to stdout")
    add("--out", metavar="DIR", help="also write report.json and report.html there")


def action(options: argparse.Namespace) -> int:
    """Measure a named model on images, print the table, write what was asked for.

    Raises:
        ValueError: no model or no images.
        OSError: results that cannot be written, before a model is loaded.
        RuntimeError: ``--out`` needs a package that is not installed, before a model is loaded.
    """
    # All that can be wrong is found out before torch is imported, which takes seconds.
    check_model_options(options)
    if options.images:
        sources = images.image_sources(options.images)
        source = f"folder {options.images}"
    else:
        sources = images.photos()
        source = images.PHOTOS_WORDS
    check(options)
    model, weights = load_as_chosen(options)
    settings = settings_of(model) | {"max_seq_len": str(options.max_seq_len)}
    skipped: list[str] = []
    batches = images.naflex_batches(sources, settings, BATCH, skipped)
    measure_and_show(model, batches, len(sources), options, weights, source, skipped)
    return 0


def check(options: argparse.Namespace) -> None:
    """Find out whether a report can be written; its folder is made.

    Raises:
        OSError: it cannot.
        RuntimeError: ``--out`` needs a package that is not installed.
    """
    if options.out:
        require("--out", "jinja2")
        Path(options.out).mkdir(parents=True, exist_ok=True)


def measure_and_show(
    model: Any,
    batches: Any,
    number: int,
    options: argparse.Namespace,
    weights: str,
    source: str,
    skipped: Sequence[str] = (),
) -> None:
    """Measure ``batches`` under checked options; print the result, and write what was asked for.

    Args:
        model: a NaFlexVit.
        batches: as ``survey`` takes them.
        number: of images, for the progress bar.
        options: of the command.
        weights: in words, which weights the model holds.
        source: in words, where the images come from.
        skipped: when all batches were read, the images that could not be.
    """
    from ..measure.drift.report import headline, rows, write
    from ..measure.drift.survey import survey

    found = survey(model, batches, images=number)
    announce_skipped(skipped)
    answer = headline(found)
    print(f"Drift from timm's result: {options.model}; weights: {weights}")
    print(marked(f"{table(rows(found))}\n{answer}"))
    # As they are now, whether the weights' settings or --model-kwargs made them so.
    settings = [f"{name} {value}" for name, value in vars(model.embeds).items()]
    record = {
        "survey": found,
        "model": options.model,
        "weights": weights,
        "settings": ", ".join(one for one in settings if one.startswith("pos_embed_")),
        "source": source,
        "made": provenance(options.command),
        "skipped": skipped,
        "headline": answer,
    }
    # What is asked for in files comes last: a disk that is full leaves the table on the screen.
    options.figures.update(record)
    if options.out:
        write(record, options.out)
        print(f"written: report.json and report.html in {printable(options.out)}")
