"""Whole models, eager and compiled: a training step or an inference.

| phase | what is timed |
| --- | --- |
| train | forward, cross entropy over the classes, backward, AdamW's step, zeroing the gradients |
| infer | the forward pass, eval mode, under ``torch.inference_mode`` |

The batch has random patches, padded and numbered as timm's NaFlex collator does it. A dtype other
than float32 runs under autocast.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ....patching.choices import Mode
from ....patching.install import enable
from ..contenders import BASELINE
from ..output import progress
from .race import WARMUPS, Row, now, rows, turns
from .workloads import Grid, Workload, coordinates

BACKEND = "inductor"
Step = Callable[[Any, dict[str, Tensor]], None]  # see ``make_step``


@dataclass(frozen=True)
class Steps:
    """Steps of one model on batches of one kind.

    Attributes:
        model: a NaFlexVit.
        workloads: the grids of the batches; several are for compiled models, which meet them in
            turn.
        batch: images in a batch.
        dtype: of autocast; "float32": without.
        phase: "train" or "infer".
    """

    model: Any
    workloads: Sequence[Workload]
    batch: int
    dtype: str
    phase: str

    def facts(self, suite: str, **about: Any) -> Row:
        """What every row says of these steps; ``about`` adds to its further facts."""
        about["device"] = next(self.model.parameters()).device.type
        about["model"] = self.model.pretrained_cfg["architecture"]
        return dict(
            suite=suite,
            workload=" ".join(workload.name for workload in self.workloads),
            phase=self.phase,
            batch=self.batch,
            dtype=self.dtype,
            about=about,
        )


def race_eager(steps: Steps, contenders: Sequence[str], rounds: int) -> list[Row]:
    """Time whole steps of the model, which is switched to a contender before each of them."""
    model = steps.model
    (workload,) = steps.workloads
    # One batch for all: two times differ by the contender, and by noise.
    batch = random_batch(model, workload.grids(steps.batch), workload.length)
    step = make_step(model, steps.dtype, steps.phase)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with progress("timing", len(times) * (WARMUPS + rounds)) as bar:
        for turn, name in turns(times, rounds):
            with chosen(name, model):
                start = now()
                step(model, batch)
                seconds = now() - start
            if turn >= 0:
                times[name].append(seconds)
            bar.update()
    return rows(steps.facts("model"), times)


def race_compiled(steps: Steps, contenders: Sequence[str], rounds: int) -> list[Row]:
    """What ``torch.compile`` makes of the model, whose batches have other grids each time.

    It is compiled for each contender, which takes the first ``rounds``, compiling included, then as
    many later ones. A round takes one batch of each workload, with other images every time. The
    rows' times are of the later rounds: for one batch, the mean of a round's.
    """
    from torch._inductor.utils import fresh_inductor_cache

    batches = _different_batches(steps, 2 * rounds)
    step = make_step(steps.model, steps.dtype, steps.phase)
    times = {}
    counted = {}
    with progress("timing", len(contenders)) as bar:
        for name in contenders:
            # What an earlier run has compiled would hide what compiling costs.
            with chosen(name, steps.model), fresh_inductor_cache():
                found = count_graphs(steps.model, batches, step, backend=BACKEND)
            seconds = torch.tensor(found.pop("seconds")).view(2, rounds, -1)
            first, later = seconds
            times[name] = later.mean(1).tolist()
            found["first steps"] = first.numel()
            found["first steps, s"] = round(first.sum().item(), 2)
            counted[name] = found
            bar.update()
    return rows(steps.facts("compiled", counted=counted), times)


def _different_batches(steps: Steps, rounds: int) -> list[dict[str, Tensor]]:
    """Round after round one batch of each workload, each with images that did not come before."""
    batches = []
    for number in range(rounds):
        for workload in steps.workloads:
            # A smaller batch begins a larger one, so the last images are new ones.
            grids = workload.grids((number + 1) * steps.batch)[-steps.batch :]
            batches.append(random_batch(steps.model, grids, workload.length))
    return batches


def count_graphs(
    model: Any, batches: Sequence[Any], step: Callable[..., Any], **options: Any
) -> dict[str, Any]:
    """Compile a model, and run ``step(compiled, batch)`` for each batch.

    Args:
        model: any module.
        batches: as ``step`` takes them.
        step: runs the compiled model.
        options: of ``torch.compile``.

    Returns:
        The numbers of "graphs", "breaks" (where TorchDynamo leaves the graph), "graphs after the
        first batch"; and "seconds", a list: of each step.
    """
    from torch._dynamo.utils import counters

    # The counters are of the process: what other models left there must not count.
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, **options)
    graphs = []  # that there are after each batch
    seconds = []
    for batch in batches:
        start = now()
        step(compiled, batch)
        seconds.append(now() - start)
        graphs.append(counters["stats"]["unique_graphs"])
    return {
        "graphs": graphs[-1],
        "breaks": sum(counters["graph_break"].values()),
        "graphs after the first batch": graphs[-1] - graphs[0],
        "seconds": seconds,
    }


def chosen(contender: str, model: Any) -> AbstractContextManager[Any]:
    """Inside, the model computes as the contender does; "stock": with nothing replaced."""
    # timm's own time is that of timm alone: nothing of ours may be in place.
    if contender == BASELINE:
        return nullcontext()
    return enable(cast(Mode, contender), model=model)


def random_batch(model: Any, grids: list[Grid], length: int = 0) -> dict[str, Tensor]:
    """Random images of these grids, as the model takes them.

    Args:
        model: on whose device they are.
        grids: of the B images.
        length: N, to which they are padded; 0: to the longest.

    Returns:
        ``patches`` (B, N, pixels * channels) float32, ``patch_coord`` (B, N, 2) int64 and
        ``patch_valid`` (B, N) bool.
    """
    pixels = model.embeds.in_chans * math.prod(model.embeds.patch_size)
    with next(model.parameters()).device:
        coord = coordinates(grids, length)
        lengths = torch.tensor([h * w for h, w in grids])
        return {
            "patches": torch.randn(*coord.shape[:2], pixels),
            "patch_coord": coord,
            "patch_valid": torch.arange(coord.shape[1]) < lengths[:, None],
        }


def make_step(model: Any, dtype: str, phase: str) -> Step:
    """Ready the model for ``phase``, and return a function that takes one step of it.

    The function takes the model, or what it was compiled to, and a batch.
    """
    device = next(model.parameters()).device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    autocast = partial(torch.autocast, device, getattr(torch, dtype), enabled=dtype != "float32")
    is_training = phase == "train"

    def step(run: Any, batch: dict[str, Tensor]) -> None:
        with torch.inference_mode(not is_training), autocast():
            out = run(batch)
        if is_training:
            out = out.flatten(0, -2)  # (B, classes), or (B*N, C) of a model that pools nothing
            # Any class will do: a step takes as long, whatever it learns.
            classes = torch.zeros(len(out), dtype=torch.long, device=device)
            nn.functional.cross_entropy(out.float(), classes).backward()
            optimizer.step()
            optimizer.zero_grad()

    model.train(is_training)
    return step
