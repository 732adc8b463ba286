"""``naflex-fast record``: its options, and the way from a model and pictures to a recording."""

import argparse
from pathlib import Path

from ..measure import images
from ..measure.contenders import BASELINE, CONTENDERS
from ..measure.models import add_model_arguments, fingerprint
from ..measure.output import positive, progress, provenance, require
from .against import FILTERS, NEEDED, source_of
from .checks import announce_skipped, check_model_options, load_as_chosen

SIGLIP2 = "naflexvit_base_patch16_siglip.v2_webli"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options with which a model, its weights and pictures are chosen."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="the folder of the recording")
    add("--force", action="store_true", help="replace the folder if it is there")
    add("--images", metavar="DIR", help="folder of images (5 of scikit-image's photos)")
    add(
        "--library",
        choices=("timm", "transformers"),
        default="timm",
        help="whose pipeline is recorded (timm)",
    )
    add(
        "--mode",
        "--contender",  # the name of before
        choices=CONTENDERS,
        default=BASELINE,
        help=f"with --library timm: what resamples its table ({BASELINE})",
    )
    add("--interpolation", choices=FILTERS, help="filter with which timm resizes pictures")
    add(
        "--max-seq-len",
        type=positive,
        metavar="N",
        help="most patches (256; with --library transformers that of its processor's file)",
    )
    mistakes = parser.add_mutually_exclusive_group()
    mistakes.add_argument(
        "--no-mistakes",
        action="store_true",
        help="the stages alone, without known mistakes",
    )
    mistakes.add_argument(
        "--mistakes",
        type=Path,
        metavar="FILE",
        help="try those of this list, too: right and wrong lines of the port in NumPy",
    )


def record(options: argparse.Namespace) -> int:
    """Write a recording of a named model on images.

    Raises:
        ValueError: no model or no images, options that do not go together, or another tower than
            SigLIP-2's.
        FileExistsError: the folder is there, and no ``--force``.
        RuntimeError: the weights cannot be loaded, or transformers is not installed.
    """
    out = Path(options.out)
    check(options, out)
    skipped: list[str] = []
    if options.images:
        sources = images.image_sources(options.images)
    else:
        sources = images.photos()[::6]  # each photo once, in another shape
    model, weights = load_as_chosen(options)
    from vit_ports.format import write_recording
    from vit_ports.mistakes import TRIED, mistakes_of, with_mistakes

    from ..measure.pipelines import siglip2_weights, timm_source
    from ..measure.record import make_recording, with_limits

    tensors = siglip2_weights(model)
    tried = []
    if not options.no_mistakes:
        tried = mistakes_of(len(model.blocks), options.mistakes)
    if options.library == "timm":
        length = options.max_seq_len or 256  # as --help says
        source = timm_source(model, length, options.interpolation, options.mode)
    else:
        source = source_of(options, model)
    names, pictures = zip(*images.read(sources, skipped))
    announce_skipped(skipped)
    about = {
        "written_by": {
            "program": "naflex-fast record",
            "pipeline": source.words,
            **provenance(options.command),
        },
        "weights": {"words": weights, "sha256": fingerprint(model)},
    }
    recording = make_recording(source, pictures, names, about)
    recording = with_limits(recording, source)
    if tried:
        one_by_one = progress("known mistakes", tried)
        recording = with_mistakes(recording, tensors, pictures[:TRIED], one_by_one)
    write_recording(recording, pictures, out)
    shown = len(recording.about["mistakes"])
    print(
        f"written: {out}: {len(pictures)} pictures, {shown} known mistakes; {source.words}; "
        f"weights: {weights}"
    )
    return 0


def check(options: argparse.Namespace, out: Path) -> None:
    """Find out before the work whether it can be done; errors as ``record``."""
    if options.library == "transformers" and options.checkpoint and not options.model:
        options.model = SIGLIP2  # its sizes are those of the weights
    check_model_options(options)
    is_recording = (out / "recording.json").is_file()
    if out.exists() and not (options.force and is_recording):
        raise FileExistsError(f"{out} is there already; --force replaces recordings alone")
    out.resolve().parent.mkdir(parents=True, exist_ok=True)
    if options.library == "transformers":
        if options.interpolation:
            raise ValueError("--interpolation goes with --library timm")
        require("--library transformers", *NEEDED)
