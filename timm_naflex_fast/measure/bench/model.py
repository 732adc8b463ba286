"""Races of a whole model: a training step and an inference, with the share of the time that the embeddings take.

| phase | what is timed |
| --- | --- |
| infer | the forward pass, eval mode, under ``torch.inference_mode`` |
| train | forward, cross entropy over 1,000 classes, backward, AdamW's step, zeroing the gradients |

The batch is one that timm's NaFlex collator makes, of random patches. A dtype other than float32 runs under autocast.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...patching.install import enable
from ...patching.modes import Mode
from ..contenders import BASELINE
from .meters import WARMUPS, mark, seconds
from .race import Contender, Race, Row
from .workloads import Workload, coordinates

PHASES = ("infer", "train")
DTYPES = ("float32", "bfloat16")
CLASSES = 1000
STEP_WORDS = {"train": "a training step", "infer": "an inference"}


def races(
    model: Any,
    name: str,
    workloads: Sequence[Workload],
    batches: Sequence[int] = (8,),
    dtypes: Sequence[str] = ("float32",),
    phases: Sequence[str] = PHASES,
    contenders: Sequence[str] = (BASELINE, "matmul"),
) -> Iterator[Race]:
    """One race per dtype, workload, batch size and phase. All contenders run the same model, switched before each run.

    A race can run until the next one is asked for.
    """
    for dtype, workload, batch, phase in product(dtypes, workloads, sorted(set(batches)), phases):
        with ExitStack() as stack:
            race = _race(model, workload, batch, dtype, phase, contenders, stack)
            race.about["model"] = name
            yield race


def _race(
    model: Any, workload: Workload, batch: int, dtype: str, phase: str, contenders: Sequence[str], stack: ExitStack
) -> Race:
    device = next(model.parameters()).device
    grids = workload.grids(batch)
    images, targets = _collate(grids, model.embeds.patch_size)
    images = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in images.items()}
    targets = targets.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    marks = stack.enter_context(_marked(model.embeds, device))
    shares: dict[str, list[tuple[list[Any], Any, Any]]] = defaultdict(list)
    autocast = partial(torch.autocast, device.type, getattr(torch, dtype), enabled=dtype != "float32")
    on = stack.enter_context(ExitStack())  # holds the present contender's choice

    def prepare(contender: str) -> str:
        on.close()
        if contender != BASELINE:
            on.enter_context(enable(cast(Mode, contender), model=model))
        model.train(phase == "train")
        return contender

    def infer() -> None:
        with torch.inference_mode(), autocast():
            model(images)

    def train() -> None:
        with autocast():
            out = model(images)
        nn.functional.cross_entropy(out.float(), targets).backward()
        marks.append(mark(device))
        optimizer.step()
        optimizer.zero_grad()

    def step(contender: str) -> None:
        marks.clear()
        start = mark(device)
        (train if phase == "train" else infer)()
        shares[contender].append((list(marks), start, mark(device)))

    def finish() -> dict[str, Any]:
        counted = {name: steps[WARMUPS[device.type] :] for name, steps in shares.items()}
        return {"embeds_share": {name: statistics.median(map(_share, steps)) for name, steps in counted.items()}}

    about = dict(
        tokens=sum(h * w for h, w in grids),
        length=images["patches"].shape[1],
        grids=len(set(grids)),
        device=device.type,
    )
    made = tuple(Contender(c, step, partial(prepare, c), ours=c != BASELINE) for c in contenders)
    return Race("model", workload.name, phase, batch, dtype, made, about, finish)


def _collate(grids: list[tuple[int, int]], patch_size: tuple[int, int]) -> tuple[dict[str, Any], Tensor]:
    """A batch of random patches in these grids, and its classes, as timm's loader gives them to a model."""
    from timm.data.naflex_dataset import NaFlexCollator

    generator = torch.Generator().manual_seed(0)
    samples = []
    for h, w in grids:
        patches = torch.randn(h * w, 3 * patch_size[0] * patch_size[1], generator=generator)
        valid = torch.ones(h * w, dtype=torch.bool)
        sample = dict(patches=patches, patch_coord=coordinates([(h, w)])[0], patch_valid=valid)
        samples.append((sample, int(torch.randint(CLASSES, (), generator=generator))))
    return NaFlexCollator(max_seq_len=max(h * w for h, w in grids))(samples)


@contextmanager
def _marked(embeds: nn.Module, device: torch.device) -> Iterator[list[Any]]:
    """Yields a list that gets marks: where the embeddings' forward begins and ends, and where their backward begins.

    The embeddings run first, so their backward runs last: from the moment when the gradient of their output is known
    to the end of the backward.
    """
    marks: list[Any] = []

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        marks.append(mark(device))
        x = output[0] if isinstance(output, tuple) else output
        if x.requires_grad:
            x.register_hook(lambda grad: marks.append(mark(device)))

    enter = embeds.register_forward_pre_hook(lambda *_: marks.append(mark(device)))
    with enter, embeds.register_forward_hook(leave):
        yield marks


def _share(step: tuple[list[Any], Any, Any]) -> float:
    """Which share of a step the embeddings take; their marks come in pairs, beginning and end."""
    marks, start, end = step
    return sum(map(seconds, marks[::2], marks[1::2])) / seconds(start, end)


def conclude(rows: Sequence[Row]) -> Iterator[str]:
    """One sentence per batch of a model: how much of a step each of our strategies saves."""
    found: dict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
    for row in sorted(rows, key=lambda row: row.phase, reverse=True):  # train before infer
        place = row.about["model"], row.workload, row.batch, row.dtype
        found[place, row.contender][row.phase] = row
    for (place, contender), phases in found.items():
        pairs = [
            (found[place, BASELINE][phase], own) for phase, own in phases.items() if phase in found[place, BASELINE]
        ]
        if contender == BASELINE or not pairs:
            continue
        model, workload, batch, dtype = place
        spreads = [row.spread for pair in pairs for row in pair if row.spread is not None]
        noise = f"differ by up to {100 * max(spreads):.1f} %" if spreads else "were too few to tell the noise"
        yield (
            f"On this machine, for {model} with {batch} images ({workload}, {dtype}), `{contender}` "
            f"{' and '.join(_saving(*pair) for pair in pairs)}; rounds of the same code {noise}."
        )


def _saving(stock: Row, own: Row) -> str:
    saved = 1 - own.median_ms / stock.median_ms
    before, after = (100 * row.about["embeds_share"][row.contender] for row in (stock, own))
    return (
        f"{'saves' if saved >= 0 else 'adds'} {abs(100 * saved):.1f} % {'of' if saved >= 0 else 'to'} "
        f"{STEP_WORDS[own.phase]} (embeddings: {before:.1f} % of it before, {after:.1f} % after)"
    )
