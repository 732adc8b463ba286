"""What commands share before they import torch: checks, so that a mistake is told at once, and words.

Tests: tests/commands/cli/test_errors_first.py.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ..measure.models import check_model, load_model
from ..measure.weight_files import find_weights

SHOWN = 5  # of what was skipped; a folder may hold thousands


def check_model_options(options: argparse.Namespace) -> None:
    """Refuse options that name no model of timm's, or weights that are not there.

    Raises:
        ValueError: no model, or one that timm does not know; a checkpoint that is not there, or a folder without weights.
    """
    if not options.model:
        raise ValueError(
            "a model is needed: --model NAME, e.g. --model naflexvit_base_patch16_siglip.v2_webli"
        )
    check_model(options.model)
    if options.checkpoint:
        find_weights(options.checkpoint)


def check_device(device: str) -> None:
    """Refuse a device that this machine has not.

    Raises:
        ValueError: CUDA, where torch sees no GPU.
    """
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            built = torch.version.cuda or "no CUDA"
            raise ValueError(f"--device cuda: torch sees no GPU (it was built for {built})")


def load_as_chosen(options: argparse.Namespace) -> tuple[Any, str]:
    """The model that checked options name, and in words which weights it holds; see ``load_model``."""
    announce(f"loading {options.model} ...")
    return load_model(
        options.model,
        options.checkpoint,
        random_weights=options.random_weights,
        **dict(options.model_kwargs),
    )


def announce(text: str) -> None:
    """Print a line to stderr at once, before something that takes seconds."""
    # Not to stdout: what is printed there is the result, which a script may read.
    print(text, file=sys.stderr, flush=True)


def announce_skipped(skipped: Sequence[str]) -> None:
    """Say in one line on stderr how many files could not be read, and why the first ones."""
    if skipped:
        announce(f"skipped, not readable as images: {len(skipped):,}; {'; '.join(skipped[:SHOWN])}")
