"""``naflex-fast record``: its options, and the way from a model and pictures to a recording."""

import argparse
from importlib.util import find_spec
from pathlib import Path

from ...names import BASELINE, MODES
from ..measure import images
from ..measure.models import add_model_arguments, fingerprint
from ..measure.output import positive, progress, provenance, require
from ..measure.weight_files import find_weights
from .checks import announce_skipped, check_model_options, load_as_chosen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options with which a model, its weights and pictures are chosen."""
    add_model_arguments(parser)
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="the folder of the recording")
    pictures = parser.add_mutually_exclusive_group(required=True)
    pictures.add_argument("--images", metavar="DIR", help="folder of images")
    pictures.add_argument(
        "--pixels-of",
        metavar="DIR",
        help="go on from the grids and pixels of this recording, in place of --images: two towers "
        "are compared, and how they read pictures is not",
    )
    add(
        "--library",
        choices=("timm", "transformers"),
        default="timm",
        help="whose pipeline is recorded (timm)",
    )
    add(
        "--mode",
        choices=MODES,
        default=BASELINE,
        help=f"with --library timm: what resamples its table ({BASELINE})",
    )
    add("--interpolation", choices=images.FILTERS, help="filter with which timm resizes pictures")
    add(
        "--max-seq-len",
        type=positive,
        metavar="N",
        help="most patches (256; with --library transformers that of its processor's file)",
    )
    add("--no-mistakes", action="store_true", help="the stages alone, without known mistakes")


def action(options: argparse.Namespace) -> int:
    """Write a recording of a named model on images.

    Raises:
        ValueError: no model, options that do not go together, a folder that is no
            recording, or another tower than SigLIP-2's.
        FileExistsError: the folder is there.
        RuntimeError: the weights cannot be loaded; vit_ports or transformers is not installed.
    """
    out = Path(options.out)
    check(options, out)
    from vit_ports.format import read_recording, write_recording
    from vit_ports.mistakes import TRIED, mistakes_of, with_mistakes
    from vit_ports.towers.siglip2 import SIGLIP2

    skipped: list[str] = []
    other = None
    if options.pixels_of:
        other = read_recording(Path(options.pixels_of))
        options.max_seq_len = other.about["max_patches"]
        sources = images.image_sources(Path(options.pixels_of, "pictures"))
    else:
        sources = images.image_sources(options.images)
    model, weights = load_as_chosen(options)
    from ..measure.pipelines import siglip2_weights, timm_source, transformers_source
    from ..measure.record import make_recording

    tensors = siglip2_weights(model)
    if options.library == "timm":
        length = options.max_seq_len or 256  # as --help says
        source = timm_source(model, length, options.interpolation, options.mode)
    else:
        folder = find_weights(options.checkpoint).parent
        source = transformers_source(model, options.max_seq_len, folder)
    names, pictures = zip(*images.read(sources, skipped))
    announce_skipped(skipped)
    if other:
        recorded = other.about["pictures"]
        if [f"pictures/{name}" for name in names] != [picture["file"] for picture in recorded]:
            raise ValueError(
                f"the pictures in {options.pixels_of} are not those of its recording.json"
            )
        names = tuple(picture["name"] for picture in recorded)
    about = {
        "written_by": {
            "program": "naflex-fast record",
            "pipeline": source.words,
            **provenance(options.command),
        },
        "weights": {"words": weights, "sha256": fingerprint(model)},
    }
    recording = make_recording(source, pictures, names, about, other)
    if not options.no_mistakes:
        mistakes = mistakes_of(SIGLIP2, len(model.blocks))
        one_by_one = progress("known mistakes", mistakes)
        recording = with_mistakes(SIGLIP2, recording, tensors, pictures[:TRIED], one_by_one)
    write_recording(recording, pictures, out)
    shown = len(recording.about["mistakes"])
    print(
        f"written: {out}: {len(pictures)} pictures, {shown} known mistakes; {source.words}; "
        f"weights: {weights}"
    )
    return 0


def check(options: argparse.Namespace, out: Path) -> None:
    """Find out before the work whether it can be done; errors as ``action``."""
    if find_spec("vit_ports") is None:
        raise RuntimeError(
            "record needs vit_ports, which is in this repository: pip install . ./ports"
        )
    check_model_options(options)
    if out.exists():
        raise FileExistsError(f"{out} is there already")
    out.resolve().parent.mkdir(parents=True, exist_ok=True)
    if options.pixels_of and (options.interpolation or options.max_seq_len):
        raise ValueError("--pixels-of goes without --interpolation and --max-seq-len")
    if options.library == "transformers":
        if options.interpolation:
            raise ValueError("--interpolation goes with --library timm")
        require("--library transformers", "transformers", "torchvision")
        if not options.checkpoint:
            raise ValueError(
                "--library transformers needs --checkpoint: its settings lie beside it"
            )
