"""Races of whole models: a training step, or an inference, and the embeddings' share of it."""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pos_embed import WORKLOADS
from racing import WARMUPS, Race, Row, Timed, now, time_race
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from timm_naflex_fast.commands.cli import main as cli
from timm_naflex_fast.commands.measure.bench.model import chosen, make_step, random_batch
from timm_naflex_fast.commands.measure.bench.workloads import Grid
from timm_naflex_fast.commands.measure.contenders import BASELINE
from timm_naflex_fast.commands.measure.models import load_model

CONTENDERS = (BASELINE, "matmul")


def races(
    tiny: bool, *, model: str, names: Sequence[str], batch: int, rounds: int, budget: float
) -> Iterator[list[Row]]:
    """Rows of race after race, training and inference of each workload that is named.

    Args:
        tiny: shows only that they run.
        model: timm's name of it; it has random weights.
        names: of ``WORKLOADS``.
        batch: images in a batch.
        rounds: of each race, at most.
        budget: seconds for each contender in a race.
    """
    small: dict[str, Any] = dict(depth=1, embed_dim=64, num_heads=2) if tiny else {}
    loaded, _ = load_model(model, random_weights=True, num_classes=1000, **small)
    for name, phase in product(names, ("train", "infer")):
        grids = WORKLOADS[name].grids(1 if tiny else batch)
        with ExitStack() as stack:
            made = race(loaded, name, grids, phase, CONTENDERS, stack)
            yield time_race(made, budget, tiny, rounds)


def race(
    model: Any,
    workload: str,
    grids: Sequence[Grid],
    phase: str,
    contenders: Sequence[str],
    stack: ExitStack,
) -> Race:
    """The race of steps on a batch of these grids; what the last one switched on stays until
    ``stack`` is closed.
    """
    batch = random_batch(model, grids)
    step = make_step(model, "float32", phase)
    embeds_share: dict[str, float] = {}
    shares: dict[str, list[float]] = defaultdict(list)

    def prepare(contender: str) -> str:
        stack.close()  # ends what the contender before switched on
        stack.enter_context(chosen(contender, model))
        return contender

    def work(contender: str) -> None:
        with _marked(model.embeds) as marks:
            step(model, batch)
        shares[contender].append(_share(marks))
        counted = shares[contender][WARMUPS:]
        embeds_share[contender] = statistics.median(counted or [0])

    about = dict(
        device="cpu",
        model=model.pretrained_cfg["architecture"],
        grids=len(set(grids)),
        tokens=sum(h * w for h, w in grids),
        embeds_share=embeds_share,
    )
    made = tuple(Timed(name, work, partial(prepare, name)) for name in contenders)
    return Race("model", workload, phase, len(grids), "float32", made, about)


def compiled(tiny: bool) -> Iterator[list[Row]]:
    """What ``naflex-fast bench --compile`` says of four blocks, whose batches have four lengths."""
    options = "bench --compile --model naflexvit_base_patch16_siglip --model-kwargs num_heads=2"
    if tiny:
        options += " depth=1 embed_dim=64 --max-seq-len 64 --batch-size 1"
    else:
        options += " depth=4 embed_dim=192 --max-seq-len 64 128 196 256"
    with TemporaryDirectory() as folder:
        file = Path(folder, "bench.json")
        cli.main([*options.split(), "--json", str(file)])
        yield json.loads(file.read_text())["rows"]


@contextmanager
def _marked(embeds: nn.Module) -> Iterator[list[float]]:
    """Yields the times of a step's marks.

    They are its start, where the embeddings' forward begins and ends, in training where their
    backward begins and ends, and the step's end. The embeddings run first, so their backward runs
    last: from the moment when the gradient of their output is known to the optimizer's step.
    """
    marks = [now()]

    def mark(*_: Any) -> None:
        marks.append(now())

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        mark()
        x = output[0] if isinstance(output, tuple) else output
        if x.requires_grad:
            x.register_hook(mark)

    with (
        embeds.register_forward_pre_hook(mark),
        embeds.register_forward_hook(leave),
        register_optimizer_step_pre_hook(mark),
    ):
        yield marks
    mark()


def _share(marks: Sequence[float]) -> float:
    """The share of a step that lies between the marks of the embeddings: see :func:`_marked`."""
    inside = 0.0
    for begin in range(1, len(marks) - 1, 2):
        inside += marks[begin + 1] - marks[begin]
    return inside / (marks[-1] - marks[0])
