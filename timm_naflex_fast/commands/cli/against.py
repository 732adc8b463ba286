"""``naflex-fast drift --against``: its options, and the way from them to a comparison of pipelines."""

import argparse
from collections.abc import Sequence
from importlib.metadata import version
from itertools import islice
from typing import Any

from ...names import STRATEGY_NAMES
from ...text_table import table
from ..measure.contenders import BASELINE
from ..measure.images import Source, read
from ..measure.output import positive, require

PARTS = 1  # the exit status
NEEDED = ("transformers", "torchvision")
FILTERS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")  # timm's names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options with which another library's pipeline is chosen."""
    parser.add_argument(
        "--interpolation",
        choices=FILTERS,
        help="filter with which pictures are resized (that of the model's data configuration)",
    )
    parser.add_argument(
        "--against",
        choices=["transformers"],
        help="also compare with that library's SigLIP-2, stage by stage",
    )
    parser.add_argument(
        "--against-images",
        type=positive,
        default=32,
        metavar="N",
        help="with --against: on the first N images (32); all their stages are held in memory",
    )
    parser.add_argument(
        "--stage-from",
        choices=["pictures", "patches"],
        default="pictures",
        help="with --against: patches gives both the other library's patches (pictures)",
    )


def check(options: argparse.Namespace) -> None:
    """Find out whether the comparison can be made.

    Raises:
        RuntimeError: the library is not installed.
        ValueError: another number type than float32.
    """
    if options.against:
        if options.dtype != "float32":
            raise ValueError("--against compares in float32; leave --dtype out")
        require("--against transformers", *NEEDED)


def source_of(options: argparse.Namespace, model: Any) -> Any:
    """transformers' pipeline. Its settings of tower and processor lie beside its weights."""
    from ..measure.pipelines import transformers_source
    from ..measure.weight_files import find_weights

    folder = None
    if options.checkpoint:
        folder = find_weights(options.checkpoint).parent
    return transformers_source(model, options.max_seq_len, folder)


def compare(model: Any, sources: Sequence[Source], options: argparse.Namespace) -> dict[str, Any]:
    """Compare the model and pictures of ``drift`` with transformers'; print it, return the figures."""
    from vit_ports.verdict import as_json, cells, sentences

    from ..measure.against import against_transformers

    source = source_of(options, model)
    images = islice(read(sources, []), options.against_images)
    found = against_transformers(
        source,
        [picture for _, picture in images],
        contenders=options.modes or STRATEGY_NAMES,
        interpolation=options.interpolation,
        same_patches=options.stage_from == "patches",
    )
    print(f"\ntimm's own code against {source.words}, from {options.stage_from}")
    print(table([cells(row) for row in found[BASELINE].rows]))
    for name, comparison in found.items():
        who = "timm" if name == BASELINE else f"timm with {name}"
        print(f"{who} and {options.against}: {'; '.join(sentences(comparison))}")
    figures = {name: as_json(comparison) for name, comparison in found.items()}
    return {
        **figures.pop(BASELINE),
        "library": options.against,
        "version": version(options.against),
        "stage_from": options.stage_from,
        "modes": figures,
    }
