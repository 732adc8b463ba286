"""Whole models, eager and compiled: a training step or an inference.

| phase | what is timed |
| --- | --- |
| train | forward, cross entropy over the classes, backward, AdamW's step, zeroing the gradients |
| infer | the forward pass, eval mode, under ``torch.inference_mode`` |

The batch has random patches, padded and numbered as timm's NaFlex collator does it. A dtype other
than float32 runs under autocast. Eager steps also tell the share of time that embeddings take.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...patching.choices import Mode
from ...patching.install import enable
from ..contenders import BASELINE
from .race import WARMUPS, Advance, Race, Row, Timed, now, run
from .workloads import Grid, Workload, coordinates

BACKEND = "inductor"
Step = Callable[..., None]  # see ``make_step``


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

    @property
    def device(self) -> str:
        """Where the model is: "cpu" or "cuda"."""
        return next(self.model.parameters()).device.type

    def race(self, suite: str, contenders: Sequence[Timed], **about: Any) -> Race:
        """The race of these contenders; ``about`` tells more than every race of a model does."""
        name = " ".join(dict.fromkeys(workload.name for workload in self.workloads))
        model = self.model.pretrained_cfg["architecture"]
        about |= dict(device=self.device, model=model)
        return Race(suite, name, self.phase, self.batch, self.dtype, tuple(contenders), about)


def race_eager(
    steps: Steps, contenders: Sequence[str], rounds: int, budget: float, advance: Advance
) -> tuple[Race, list[Row]]:
    """Time whole steps of the model, which is switched to a contender before each of them."""
    with ExitStack() as stack:
        race = eager_race(steps, contenders, stack)
        return race, run(race, rounds, budget=budget, advance=advance)


def eager_race(steps: Steps, contenders: Sequence[str], stack: ExitStack) -> Race:
    """The race of eager steps; what the last one switched on stays until ``stack`` is closed."""
    model = steps.model
    (workload,) = steps.workloads
    grids = workload.grids(steps.batch)
    batch = random_batch(model, grids, workload.length)
    step = make_step(model, steps.dtype, steps.phase)
    embeds_share: dict[str, float] = {}
    shares: dict[str, list[float]] = defaultdict(list)

    def prepare(contender: str) -> str:
        stack.close()  # ends what the contender before switched on
        switch(model, contender, steps.phase, stack)
        return contender

    def work(contender: str) -> None:
        step(model, batch)

    def timed_work(contender: str) -> None:
        with _marked(model.embeds) as marks:
            step(model, batch, lambda: marks.append(now()))
        shares[contender].append(_share(marks))
        counted = shares[contender][WARMUPS["cpu"] :]
        embeds_share[contender] = statistics.median(counted or [0])

    about: dict[str, Any] = dict(grids=len(set(grids)), tokens=sum(h * w for h, w in grids))
    # A GPU would have to wait at each mark, which is no part of its step.
    if steps.device == "cpu":
        about["embeds_share"] = embeds_share
        work = timed_work
    made = [Timed(name, work, partial(prepare, name)) for name in contenders]
    return steps.race("model", made, **about)


def race_compiled(
    steps: Steps, contenders: Sequence[str], rounds: int, advance: Advance
) -> tuple[Race, list[Row]]:
    """What ``torch.compile`` makes of the model, whose batches have other grids each time.

    It is compiled for each contender, which takes the first ``rounds``, compiling included, then as
    many later ones. A round takes one batch of each workload, with other images every time. The
    rows' times are of the later rounds: for one batch, the mean of a round's.
    """
    from torch._inductor.utils import fresh_inductor_cache

    in_a_round = len(steps.workloads)
    batches = _different_batches(steps, 2 * rounds)
    step = make_step(steps.model, steps.dtype, steps.phase)
    times = {}
    counted = {}
    for name in contenders:
        with ExitStack() as stack, fresh_inductor_cache():
            switch(steps.model, name, steps.phase, stack)
            found = count_graphs(steps.model, batches, step, backend=BACKEND)
        seconds = found.pop("seconds")
        first = seconds[: rounds * in_a_round]
        later = seconds[rounds * in_a_round :]
        starts = range(0, len(later), in_a_round)
        times[name] = [sum(later[i : i + in_a_round]) / in_a_round for i in starts]
        counted[name] = found | {"first steps": len(first), "first steps, s": sum(first)}
        advance(1 / len(contenders))
    race = steps.race("compiled", [], counted=counted)
    return race, race.rows(times)


def _different_batches(steps: Steps, rounds: int) -> list[dict[str, Tensor]]:
    """Round after round one batch of each workload, each with images that did not come before."""
    batches = []
    for number in range(rounds):
        for workload in steps.workloads:
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


def switch(model: Any, contender: str, phase: str, stack: ExitStack) -> None:
    """Let the model train, or infer, as the contender does until ``stack`` closes."""
    if contender != BASELINE:
        stack.enter_context(enable(cast(Mode, contender), model=model))
    model.train(phase == "train")


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
    coord = coordinates(grids, length)
    lengths = torch.tensor([h * w for h, w in grids])
    pixels = model.embeds.in_chans * math.prod(model.embeds.patch_size)
    batch = {
        "patches": torch.randn(*coord.shape[:2], pixels),
        "patch_coord": coord,
        "patch_valid": torch.arange(coord.shape[1]) < lengths[:, None],
    }
    device = next(model.parameters()).device
    return {name: tensor.to(device) for name, tensor in batch.items()}


def make_step(model: Any, dtype: str, phase: str) -> Step:
    """A function ``step(run, batch, went_back)`` that takes one step of ``phase``.

    ``run`` is the model, or what it was compiled to; ``went_back()`` is called after the backward.
    """
    device = next(model.parameters()).device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    autocast = partial(torch.autocast, device, getattr(torch, dtype), enabled=dtype != "float32")

    def infer(
        run: Any, batch: dict[str, Tensor], went_back: Callable[[], Any] = lambda: None
    ) -> None:
        with torch.inference_mode(), autocast():
            run(batch)

    def train(
        run: Any, batch: dict[str, Tensor], went_back: Callable[[], Any] = lambda: None
    ) -> None:
        with autocast():
            out = run(batch)  # (B, classes)
        classes = torch.zeros(len(out), dtype=torch.long, device=device)
        nn.functional.cross_entropy(out.float(), classes).backward()
        went_back()
        optimizer.step()
        optimizer.zero_grad()

    return train if phase == "train" else infer


@contextmanager
def _marked(embeds: nn.Module) -> Iterator[list[float]]:
    """Yields the times of a step's marks, to which the caller adds the end of the backward.

    They are its start, where the embeddings' forward begins and ends, in training where their
    backward begins and ends, and the step's end. The embeddings run first, so their backward runs
    last: from the moment when the gradient of their output is known to the end of the backward.
    """
    marks = [now()]

    def mark(*_: Any) -> None:
        marks.append(now())

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        mark()
        x = output[0] if isinstance(output, tuple) else output
        if x.requires_grad:
            x.register_hook(mark)

    with embeds.register_forward_pre_hook(mark), embeds.register_forward_hook(leave):
        yield marks
    mark()


def _share(marks: Sequence[float]) -> float:
    """The share of a step that lies between the marks of the embeddings: see :func:`_marked`."""
    inside = 0.0
    for begin in range(1, len(marks) - 1, 2):
        inside += marks[begin + 1] - marks[begin]
    return inside / (marks[-1] - marks[0])
