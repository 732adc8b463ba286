"""The command ``naflex-fast drift``: options, and the way from them to a report. torch is imported when it runs."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import images
from ..contenders import BASELINE, NAMES, OURS, present_name
from ..output import check_writable, positive, print_table, progress, write_json
from ..provenance import provenance

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options with which a model, its weights, images and what to measure are chosen."""
    add = parser.add_argument
    add("--model", metavar="NAME", help="timm NaFlexVit, e.g. naflexvit_base_patch16_siglip.v2_webli")
    add("--checkpoint", metavar="FILE", help="local weights (default: timm's pretrained ones)")
    add("--random-weights", action="store_true", help="measure the untrained model, as a stand-in")
    add("--images", metavar="DIR", help="folder of images (default: scikit-image's photos, cropped)")
    add("--max-seq-len", type=positive, default=256, metavar="N", help="most patches per image (256)")
    add("--batch-size", type=positive, default=16, metavar="B", help="images per batch (16)")
    several: dict[str, Any] = dict(nargs="+", metavar="NAME", type=present_name, choices=NAMES)
    several["help"] = f"of {' '.join(NAMES)} (our {len(OURS)}; with --out all)"
    add("--strategies", "--contenders", dest="contenders", **several)
    add("--dtype", choices=DTYPES, default="float32", help="cast the whole model to it (float32)")
    add("--json", metavar="FILE", help="also write the figures there")
    add("--out", metavar="DIR", help="also write report.json, report.md and report.html there")


def drift(options: argparse.Namespace) -> int:
    """Measure a named model on images, print the table and the verdict, write what was asked for.

    Raises:
        ValueError: no model, before anything is loaded.
        OSError: results that cannot be written, before a model is loaded.
        RuntimeError: ``--out`` needs a package that is not installed, before a model is loaded.
    """
    if not options.model:
        raise ValueError("drift needs --model NAME, e.g. --model naflexvit_base_patch16_siglip.v2_webli")
    check(options)
    sources = images.image_sources(options.images) if options.images else images.photos()
    from ..models import load_model

    random = options.random_weights
    model, weights = load_model(options.model, options.checkpoint, random_weights=random, dtype=options.dtype)
    batches = images.NaFlexImages(sources, model, options.max_seq_len, options.batch_size)
    source = f"folder {Path(options.images).resolve().name}" if options.images else images.PHOTOS_WORDS
    return measure_and_show(model, batches, options, weights, source)


def check(options: argparse.Namespace) -> None:
    """Find out whether the results can be written, before anything is loaded; the folder of ``--out`` is made."""
    if options.out:
        for module in ("matplotlib", "jinja2"):
            if find_spec(module) is None:
                raise RuntimeError(f"--out needs {module}: pip install {module}")
        Path(options.out).mkdir(parents=True, exist_ok=True)
        check_writable(Path(options.out) / "report.json")
    check_writable(options.json)


def measure_and_show(model: Any, batches: Any, options: argparse.Namespace, weights: str, source: str) -> int:
    """Measure ``batches`` (as ``survey`` takes them, with a length) under checked options; print and write.

    ``weights`` and ``source`` say in words which weights the model holds and where the images come from.
    """
    from ..contenders import missing
    from .report import Report, cells, columns, headline, record, verdict, write
    from .survey import survey

    names = options.contenders or (NAMES if options.out else OURS)
    runs = [name for name in dict.fromkeys([BASELINE, *names]) if missing(name, model.embeds) is None]
    print(f"{len(runs)} contenders on {len(batches)} batches: {', '.join(runs)}", file=sys.stderr, flush=True)
    advance = progress("measuring", len(runs) * len(batches))
    found = survey(model, batches, names, pictures=5 if options.out else 0, after_pass=advance)
    # The fields without their "pos_embed_".
    own = {key[10:]: value for key, value in vars(model.embeds).items() if key.startswith("pos_embed_")}
    facts = {
        "Images": f"{found.images:,} ({source})",
        "Sequence length": f"{options.max_seq_len} patches at most",
        "Its own resampling": ", ".join(f"{key} {value}" for key, value in own.items() if value is not None),
        "Number type": options.dtype,
        "Rounding": f"embeddings no farther apart than {found.tolerance:.1e}",
    }
    skipped = getattr(batches, "skipped", [])
    report = Report(options.model, weights, facts, provenance(options.command), skipped, found)
    for line in skipped:
        print(f"skipped, not readable as an image: {line}", file=sys.stderr)
    print(f"Drift from timm's own result: {report.model}; weights: {weights}; {found.images:,} images")
    headings = columns(found.drift[BASELINE])
    lines = [[name, *cells(drift, headings)] for name, drift in found.drift.items()]
    print_table(["contender", *headings.values()], lines)
    for name, why in found.left_out.items():
        print(f"not measured: {name}, {why}")
    print(f"{headline(found)}\n{verdict(found, report.stand_in)}")
    if options.json:
        write_json(options.json, record(report))
    if options.out:
        print(f"written: {', '.join(map(str, write(report, options.out)))}")
    return 0
