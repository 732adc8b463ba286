"""The command ``naflex-fast drift``: options, and the way from them to a report. torch is imported
when it runs."""

import argparse
import sys
from pathlib import Path
from typing import Any

from ..measure import images
from ..measure.contenders import BASELINE, CONTENDERS
from ..measure.drift import FILES
from ..measure.models import DTYPES, add_model_arguments, load_model
from ..measure.output import check_writable, positive, printable, progress, provenance, write_json
from ..names import STRATEGY_NAMES
from ..text_table import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options with which a model, its weights, images and what to measure are chosen."""
    add_model_arguments(parser)
    add = parser.add_argument
    add(
        "--images", metavar="DIR", help="folder of images (default: scikit-image's photos, cropped)"
    )
    add(
        "--max-seq-len",
        type=positive,
        default=256,
        metavar="N",
        help="most patches per image (256)",
    )
    add("--batch-size", type=positive, default=16, metavar="B", help="images per batch (16)")
    several: dict[str, Any] = dict(nargs="+", metavar="NAME", choices=CONTENDERS)
    add(
        "--contenders",
        **several,
        help=f"of {' '.join(CONTENDERS)} (ours and the last; with --out all)",
    )
    add("--dtype", choices=DTYPES, default="float32", help="cast the whole model to it (float32)")
    add("--json", metavar="FILE", help="also write the figures there")
    add("--out", metavar="DIR", help="also write report.json, report.md and report.html there")


def drift(options: argparse.Namespace) -> int:
    """Measure a named model on images, print the table and the verdict, write what was asked for.

    Raises:
        ValueError: no model or no images.
        OSError: results that cannot be written, before a model is loaded.
        RuntimeError: ``--out`` needs a package that is not installed, before a model is loaded.
    """
    check(options)
    sources = images.image_sources(options.images) if options.images else images.photos()
    settings = dict(options.model_kwargs) | dict(
        random_weights=options.random_weights, dtype=options.dtype
    )
    model, weights = load_model(options.model, options.checkpoint, **settings)
    batches = images.NaFlexImages(sources, model, options.max_seq_len, options.batch_size)
    source = (
        f"folder {printable(Path(options.images).resolve().name)}"
        if options.images
        else images.PHOTOS_WORDS
    )
    return measure_and_show(model, batches, options, weights, source)


def check(options: argparse.Namespace) -> None:
    """Find out whether the results can be written, before anything is loaded; the folder of
    ``--out`` is made."""
    if options.out:
        try:
            import jinja2  # noqa: F401
            import matplotlib.figure  # noqa: F401
        except Exception as error:  # missing, or made for another NumPy
            raise RuntimeError(
                f"--out needs matplotlib and jinja2: pip install matplotlib jinja2 ({error})"
            ) from error
        Path(options.out).mkdir(parents=True, exist_ok=True)
        for name in FILES:
            check_writable(Path(options.out) / name)
    check_writable(options.json)


def measure_and_show(
    model: Any, batches: Any, options: argparse.Namespace, weights: str, source: str
) -> int:
    """Measure ``batches`` (as ``survey`` takes them, with a length) under checked options; print
    and write.

    ``weights`` and ``source`` say in words which weights the model holds and where the images come
    from.
    """
    from ..measure.drift.report import columns, record, row_text, write
    from ..measure.drift.survey import survey

    names = options.contenders or (CONTENDERS if options.out else STRATEGY_NAMES)
    with progress("measuring", len(batches)) as bar:
        found = survey(model, batches, names, pictures=bool(options.out), advance=bar.update)
    known = [(name, value) for name, value in vars(model.embeds).items() if value is not None]
    how = [
        f"{name.removeprefix('pos_embed_')} {value}"
        for name, value in known
        if name.startswith("pos_embed_")
    ]
    facts = {
        "Images": f"{found.images:,} ({source})",
        "Sequence length": f"{options.max_seq_len} patches at most",
        "The model's own resampling (its settings)": ", ".join(how),
        "Number type": options.dtype,
        "Counts as rounding (a limit, for each element)": "2e-06 of the sum of absolute values of which its position "
        f"embedding is made, and the last bit of it and of the token in {options.dtype}",
    }
    facts |= getattr(batches, "facts", {})
    skipped, origin, notes = (
        getattr(batches, "skipped", []),
        provenance(options.command),
        list[str](),
    )
    naflex_siglip = options.model.startswith("naflexvit") and "siglip" in options.model
    if naflex_siglip and model.embeds.pos_embed_interp_mode == "bicubic":
        notes = [
            "These figures compare with bicubic. SigLIP-2 was trained with bilinear, as timm has it since 1.0.30."
        ]
    about = dict(
        model=options.model, weights=weights, facts=facts, notes=notes, made=origin, skipped=skipped
    )
    report = record(found, **about)
    for line in skipped:
        print(f"skipped, not readable as an image: {line}", file=sys.stderr)
    print(
        f"Drift from timm's own result: {options.model}; weights: {weights}; {found.images:,} images"
    )
    headings = columns(found.drift[BASELINE])
    texts = {
        name: zip(headings.values(), row_text(drift, headings))
        for name, drift in found.drift.items()
    }
    print(table([{"contender": name, **dict(text)} for name, text in texts.items()]))
    for name, why in found.left_out.items():
        print(f"not measured: {name}, {why}")
    print("\n".join([*notes, report["headline"], report["verdict"]]))
    if options.json:
        write_json(options.json, report)
    if options.out:
        print(f"written: {', '.join(map(printable, write(report, found, options.out)))}")
    return 0
