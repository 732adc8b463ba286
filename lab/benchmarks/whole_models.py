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

from lab.benchmarks.pos_embed import WORKLOADS, Row, time_race
from timm_naflex_fast import enable
from timm_naflex_fast.commands.cli import main as cli
from timm_naflex_fast.commands.measure.bench.model import make_step, random_batch
from timm_naflex_fast.commands.measure.models import load_model
from timm_naflex_fast.names import BASELINE

NAMES = (BASELINE, "matmul")
BATCH = 8
EMBEDS = "embeddings alone"
ROUNDS = 10


def races(model: str, names: Sequence[str]) -> Iterator[list[Row]]:
    """Rows of race after race, training and inference of each workload that is named.

    Args:
        model: timm's name of it; it has random weights.
        names: of ``WORKLOADS``.
    """
    loaded, _ = load_model(model, random_weights=True, num_classes=1000)
    for name, phase in product(names, ("train", "infer")):
        grids = WORKLOADS[name].grids(BATCH)
        inputs = random_batch(loaded, grids)
        step = partial(make_step(loaded, "float32", phase), loaded, inputs)
        embed = partial(_embed, loaded.embeds, inputs)
        with ExitStack() as stack:
            ready = partial(_ready, loaded, stack)
            sides = {mode: partial(ready, mode, step) for mode in NAMES}
            sides[EMBEDS] = partial(ready, BASELINE, embed)
            facts = dict(workload=name, phase=phase, batch=BATCH)
            stock, ours, embeds = time_race(facts, sides, ROUNDS)
        share = embeds["median_ms"] / stock["median_ms"]
        about = {"model": model, "embeds_share": {BASELINE: share}}
        yield [{**row, "about": about} for row in (stock, ours)]


def _ready(model: Any, stack: ExitStack, mode: Any, work: Callable[[], None]) -> Any:
    stack.close()  # ends the mode before
    stack.enter_context(enable(mode, model=model))
    return work


def _embed(embeds: Any, inputs: dict[str, Any]) -> None:
    """The embeddings alone; of a model in training, with their backward pass."""
    with torch.set_grad_enabled(embeds.training):
        tokens, _ = embeds(inputs["patches"], inputs["patch_coord"], inputs["patch_valid"])
    if embeds.training:
        tokens.backward(tokens.detach())
        embeds.zero_grad()


def compiled() -> Iterator[list[Row]]:
    """What ``naflex-fast bench --compile`` says of four blocks, whose batches have four lengths."""
    options = (
        "bench --compile --phase train --model naflexvit_base_patch16_siglip --model-kwargs "
        "num_heads=2 depth=4 embed_dim=192 --max-seq-len 64 128 196 256"
    )
    with TemporaryDirectory() as folder:
        file = Path(folder, "bench.json")
        cli.main([*options.split(), "--json", str(file)])
        yield json.loads(file.read_text())["rows"]
