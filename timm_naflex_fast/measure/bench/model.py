"""Races of a whole model: a training step and an inference, with the share of the time that the embeddings take.

| phase | what is timed |
| --- | --- |
| infer | the forward pass, eval mode, under ``torch.inference_mode`` |
| train | forward, cross entropy over 1,000 classes, backward, AdamW's step, zeroing the gradients |

The batch is one that timm's NaFlex collator makes, of random patches. A dtype other than float32 runs under autocast.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...patching.install import enable
from ...patching.modes import Mode
from .meters import WARMUPS, Marks
from .race import BASELINE, Contender, Race, Row
from .workloads import Workload, coordinates

PHASES = ("infer", "train")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLASSES = 1000
STEP_WORDS = {"train": "a training step", "infer": "an inference"}


def load(name: str, device: str) -> Any:
    """A timm NaFlexVit with random weights and a classifier; a ViT is made as a NaFlexVit, where timm can.

    Raises:
        ValueError: timm has no such model, or it is no NaFlexVit; names valid ones.
    """
    import timm

    name = name.split(".")[0]  # weights do not change the time
    how: dict[str, Any] = {} if "naflexvit" in name else {"use_naflex": True}
    try:
        model = timm.create_model(name, num_classes=CLASSES, **how)
    except (RuntimeError, TypeError):
        model = None
    if not hasattr(model, "embeds"):
        valid = ", ".join([*timm.list_models("naflexvit*"), "vit_small_patch16_224 and other ViTs"])
        raise ValueError(f"timm cannot make {name!r} a NaFlexVit; valid: {valid}")
    return model.to(device)


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
    embeds = stack.enter_context(_EmbedsTimer(model.embeds, device))
    autocast = partial(torch.autocast, device.type, DTYPES[dtype], enabled=dtype != "float32")
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
        embeds.end_backward()
        optimizer.step()
        optimizer.zero_grad()

    def step(contender: str) -> None:
        start = embeds.start(contender)
        (train if phase == "train" else infer)()
        embeds.stop(start)

    about = dict(
        tokens=sum(h * w for h, w in grids),
        length=images["patches"].shape[1],
        grids=len(set(grids)),
        device=device.type,
    )
    made = tuple(Contender(c, step, partial(prepare, c), ours=c != BASELINE) for c in contenders)
    finish = partial(embeds.shares, WARMUPS[device.type])
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


class _EmbedsTimer:
    """Tells how much of a step the embeddings take: their forward, and their part of the backward.

    The embeddings run first, so their backward runs last: from the moment when the gradient of their output is known
    to the end of the backward.
    """

    def __init__(self, embeds: nn.Module, device: torch.device) -> None:
        self._embeds, self._marks = embeds, Marks(device)
        self._steps: dict[str, list[tuple[list[Any], Any, Any]]] = {}
        self._now: list[Any] = []
        self._contender = ""

    def __enter__(self) -> _EmbedsTimer:
        mark = self._marks.mark

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self._now.append(mark())
            x = output[0] if isinstance(output, tuple) else output
            if x.requires_grad:
                x.register_hook(lambda grad: self._now.append(mark()))

        enter = self._embeds.register_forward_pre_hook(lambda *_: self._now.append(mark()))
        self._hooks = [enter, self._embeds.register_forward_hook(leave)]
        return self

    def __exit__(self, *exc: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def start(self, contender: str) -> Any:
        """Begin a contender's step."""
        self._contender, self._now = contender, []
        return self._marks.mark()

    def end_backward(self) -> None:
        """The backward has ended."""
        self._now.append(self._marks.mark())

    def stop(self, start: Any) -> None:
        """End the step."""
        self._steps.setdefault(self._contender, []).append((self._now, start, self._marks.mark()))

    def shares(self, warmup: int) -> dict[str, Any]:
        """``{"embeds_share": {contender: median share of the step}}`` over the steps after ``warmup``."""
        seconds = self._marks.seconds
        shares = {}
        for contender, steps in self._steps.items():
            shares[contender] = statistics.median(
                sum(seconds(a, b) for a, b in zip(marks[::2], marks[1::2])) / seconds(start, end)
                for marks, start, end in steps[warmup:] or steps
            )
        return {"embeds_share": shares}


def conclude(rows: Sequence[Row]) -> Iterator[str]:
    """One sentence per batch of a model: how much of a step each of our strategies saves."""
    found: dict[tuple[Any, ...], dict[str, dict[str, Row]]] = {}
    for row in rows:
        place = row.about["model"], row.workload, row.batch, row.dtype
        found.setdefault(place, {}).setdefault(row.phase, {})[row.contender] = row
    for (model, workload, batch, dtype), phases in found.items():
        ours = dict.fromkeys(row.contender for race in phases.values() for row in race.values() if row.ours)
        for contender in ours:
            parts, spreads = list[str](), list[float]()
            for phase in sorted(phases, reverse=True):
                stock, own = phases[phase].get(BASELINE), phases[phase].get(contender)
                if stock is not None and own is not None:
                    parts.append(f"{_saving(stock, own)} {STEP_WORDS[phase]} ({_shares(stock, own)})")
                    spreads += [row.spread for row in (stock, own) if row.spread is not None]
            if parts:
                noise = f"differ by up to {100 * max(spreads):.1f} %" if spreads else "were too few to tell the noise"
                yield (
                    f"On this machine, for {model} with {batch} images ({workload}, {dtype}), `{contender}` "
                    f"{' and '.join(parts)}; rounds of the same code {noise}."
                )


def _saving(stock: Row, own: Row) -> str:
    saved = 1 - own.median_ms / stock.median_ms
    return f"saves {100 * saved:.1f} % of" if saved >= 0 else f"adds {-100 * saved:.1f} % to"


def _shares(stock: Row, own: Row) -> str:
    before, after = (100 * row.about["embeds_share"][row.contender] for row in (stock, own))
    return f"embeddings: {before:.1f} % of it before, {after:.1f} % after"
