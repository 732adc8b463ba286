"""Races of whole models: a training step, or an inference, and the embeddings' share of it."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lab.benchmarks.pos_embed import WORKLOADS
from lab.benchmarks.rows import Row, time_race
from timm_naflex_fast import enable
from timm_naflex_fast.commands.cli import main as cli
from timm_naflex_fast.commands.measure.bench.model import make_step, random_batch
from timm_naflex_fast.commands.measure.models import load_model
from timm_naflex_fast.names import BASELINE

NAMES = (BASELINE, "matmul")


def races(model: str, names: Sequence[str], batch: int, rounds: int) -> Iterator[list[Row]]:
    """Rows of race after race, training and inference of each workload that is named.

    Args:
        model: timm's name of it; it has random weights.
        names: of ``WORKLOADS``.
        batch: images in a batch.
        rounds: of a race.
    """
    loaded, _ = load_model(model, random_weights=True, num_classes=1000)
    for name, phase in product(names, ("train", "infer")):
        grids = WORKLOADS[name].grids(batch)
        facts: Row = dict(workload=name, phase=phase, batch=len(grids))
        inputs = random_batch(loaded, grids)
        step = partial(make_step(loaded, "float32", phase), loaded, inputs)
        embed = partial(_embed, loaded.embeds, inputs)
        both = []
        for work in (step, embed):
            with ExitStack() as stack:
                sides = {mode: partial(_ready, loaded, work, mode, stack) for mode in NAMES}
                both.append(time_race(facts, sides, rounds))
        whole, embeds = both
        shares = {}
        for row, part in zip(whole, embeds):
            shares[row["contender"]] = part["median_ms"] / row["median_ms"]
        about = {"model": model, "embeds_share": shares}
        yield [{**row, "about": about} for row in whole]


def _ready(model: Any, work: Callable[[], None], mode: Any, stack: ExitStack) -> Any:
    stack.close()  # ends the mode before
    stack.enter_context(enable(mode, model=model))
    return work


def _embed(embeds: Any, inputs: dict[str, Any]) -> None:
    """The embeddings alone; of a model in training, with their backward pass."""
    with torch.set_grad_enabled(embeds.training):
        out = embeds(inputs["patches"], inputs["patch_coord"], inputs["patch_valid"])
    tokens = out[0] if isinstance(out, tuple) else out
    if embeds.training:
        tokens.backward(tokens.detach())
        embeds.zero_grad()


def compiled() -> Iterator[list[Row]]:
    """What ``naflex-fast bench --compile`` says of four blocks, whose batches have four lengths."""
    options = (
        "bench --compile --model naflexvit_base_patch16_siglip --model-kwargs num_heads=2 depth=4 "
        "embed_dim=192 --max-seq-len 64 128 196 256"
    )
    with TemporaryDirectory() as folder:
        file = Path(folder, "bench.json")
        cli.main([*options.split(), "--json", str(file)])
        yield json.loads(file.read_text())["rows"]
