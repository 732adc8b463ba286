"""``naflex-fast drift --against``: its options, and the way from them to a comparison of pipelines."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from ..measure.images import Source, picture_batches
from ..measure.output import progress
from ..names import STRATEGY_NAMES
from ..text_table import table

PARTS = 1  # the exit status
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
        "--stage-from",
        choices=["pictures", "patches"],
        default="pictures",
        help="with --against: patches gives both the other library's patches (pictures)",
    )


def check(options: argparse.Namespace) -> None:
    """Find out whether the comparison can be made.

    Raises:
        RuntimeError: the library is not installed.
        ValueError: another number type than float32, or ``--stage-from`` without ``--against``.
    """
    if options.against is None:
        if options.stage_from != "pictures":
            raise ValueError("--stage-from goes with --against; valid: --against transformers")
        return
    if options.dtype != "float32":
        raise ValueError("--against compares in float32; leave --dtype out")
    for package in ("transformers", "torchvision"):
        if find_spec(package) is None:
            raise RuntimeError(f"--against transformers needs {package}: pip install {package}")


def measure(
    model: Any, sources: Sequence[Source], options: argparse.Namespace, weights: str
) -> Any:
    """What :func:`against_transformers` finds, for the model and pictures of ``drift``.

    ``weights``: in words, which weights the model holds.
    """
    from ..measure.against import against_transformers
    from ..measure.checkpoints import TITLES, read_config
    from ..measure.weight_files import find_weights

    # Beside transformers' weights lie its settings of the tower and of the processor.
    folder = None
    if options.checkpoint:
        folder = find_weights(options.checkpoint).parent
    # timm's names come with timm's model, which knows its heads; transformers' need a config.json.
    heads_are_known = True
    if TITLES["transformers"] in weights and folder is not None:
        heads_are_known = bool(read_config(folder)) or "num_heads" in dict(options.model_kwargs)
    count = -(-len(sources) // options.batch_size)
    with progress(f"comparing with {options.against}", count) as bar:
        found = against_transformers(
            model,
            picture_batches(sources, options.batch_size),
            folder=folder,
            contenders=options.modes or STRATEGY_NAMES,
            max_seq_len=options.max_seq_len,
            interpolation=options.interpolation,
            heads_are_known=heads_are_known,
            same_patches=options.stage_from == "patches",
            advance=bar.update,
        )
    if options.random_weights:
        verdict = f"{found.verdict} These weights are random, not SigLIP-2's."
        return replace(found, verdict=verdict)
    return found


def show(found: Any) -> None:
    """Print the table of stages and the verdict."""
    from ..measure.against import stage_rows

    print(f"\ntimm's own code against {found.library} {found.version}, from {found.stage_from}")
    print(table(stage_rows(found)))
    print(found.verdict)
