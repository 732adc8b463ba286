"""Whole models, eager and compiled: a training step and an inference, with the share of time that
embeddings take.

| phase | what is timed |
| --- | --- |
| train | forward, cross entropy over the classes, backward, AdamW's step, zeroing the gradients |
| infer | the forward pass, eval mode, under ``torch.inference_mode`` |

The batch has random patches, padded and numbered as timm's NaFlex collator does it. A dtype other
than float32 runs under autocast.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ...patching.choices import Mode
from ...patching.install import enable
from ..contenders import BASELINE
from .race import WARMUPS, Race, Timed, now
from .workloads import Grid, Workload, coordinates

BACKEND = "inductor"
DEFAULTS = dict[str, Any](
    batches=[8], dtypes=["float32"], phases=["train", "infer"], contenders=[BASELINE, "matmul"]
)


def race(
    model: Any,
    workload: Workload,
    batch: int,
    dtype: str,
    phase: str,
    contenders: Sequence[str],
    stack: ExitStack,
) -> Race:
    """The race of these contenders on whole steps of one model, which is switched before each;
    ``stack`` ends it."""
    grids, device = workload.grids(batch), next(model.parameters()).device.type
    inputs, step = random_batch(model, grids, workload.length), make_step(model, dtype, phase)
    shares, embeds_share = defaultdict[str, list[float]](list), dict[str, float]()

    def prepare(contender: str) -> str:
        stack.close()
        switch(model, contender, phase, stack)
        return contender

    def timed(contender: str) -> None:
        with _marked(model.embeds) as marks:
            step(model, inputs, lambda: marks.append(now()))
        start, *pairs, end = marks
        shares[contender].append(
            sum(b - a for a, b in zip(pairs[::2], pairs[1::2])) / (end - start)
        )
        embeds_share[contender] = statistics.median(shares[contender][WARMUPS[device] :] or [0])

    about: dict[str, Any] = dict(
        grids=len(set(grids)), tokens=sum(h * w for h, w in grids), device=device
    )
    about["model"] = model.pretrained_cfg["architecture"]
    if device == "cpu":  # a GPU would have to wait at each mark
        about["embeds_share"] = embeds_share
    work = timed if device == "cpu" else lambda contender: step(model, inputs)
    made = tuple(Timed(name, work, partial(prepare, name)) for name in contenders)
    return Race("model", workload.name, phase, batch, dtype, made, about)


def count_graphs(
    model: Any, batches: Sequence[Any], step: Callable[..., Any], **options: Any
) -> dict[str, Any]:
    """Compile a model with these options of ``torch.compile``, and run ``step(compiled, batch)``
    for each batch.

    Returns:
        The numbers of "graphs", "breaks" (where TorchDynamo leaves the graph), "graphs after the
        first batch"; and "seconds", a list: of each step.
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled, first, taken = torch.compile(model, **options), 0, []
    for batch in batches:
        start = now()
        step(compiled, batch)
        taken.append(now() - start)
        first = first or counters["stats"]["unique_graphs"]
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return {
        "graphs": graphs,
        "breaks": breaks,
        "graphs after the first batch": graphs - first,
        "seconds": taken,
    }


def compiled(
    model: Any,
    workloads: Sequence[Workload],
    batch: int,
    dtype: str,
    phase: str,
    contenders: Sequence[str],
    steps: int,
) -> tuple[Race, list[dict[str, Any]]]:
    """What ``torch.compile`` makes of a model whose batches have other grids, and other lengths,
    each time.

    It is compiled for each contender, which takes the first ``steps``, compiling included, then as
    many later ones.

    Each step takes one batch of each workload, with other images every time. The rows' times are of
    the later steps: milliseconds for one batch, the mean of a step's; see ``Race.rows``.
    """
    from torch._inductor.utils import fresh_inductor_cache

    turn, step, batches = len(workloads), make_step(model, dtype, phase), []
    for number in range(2 * steps * turn):
        grids = workloads[number % turn].grids((number // turn + 1) * batch)[-batch:]
        batches.append(random_batch(model, grids, workloads[number % turn].length))
    device, times, counted = next(model.parameters()).device.type, {}, {}
    for name in contenders:
        with ExitStack() as stack, fresh_inductor_cache():
            switch(model, name, phase, stack)
            found = count_graphs(model, batches, step, backend=BACKEND)
        seconds = found.pop("seconds")
        first, later = seconds[: steps * turn], seconds[steps * turn :]
        times[name] = [sum(later[i : i + turn]) / turn for i in range(0, len(later), turn)]
        counted[name] = found | {"first steps": len(first), "first steps, s": sum(first)}
    about = dict(device=device, model=model.pretrained_cfg["architecture"], counted=counted)
    name = " ".join(dict.fromkeys(workload.name for workload in workloads))
    race = Race("compiled", name, phase, batch, dtype, (), about)
    return race, race.rows(times)


def switch(model: Any, contender: str, phase: str, stack: ExitStack) -> None:
    """Let the model compute as the contender does until ``stack`` closes; in training or eval
    mode."""
    if contender != BASELINE:
        stack.enter_context(enable(cast(Mode, contender), model=model))
    model.train(phase == "train")


def random_batch(model: Any, grids: list[Grid], length: int = 0) -> dict[str, torch.Tensor]:
    """Random images of these grids, as the model takes them; padded to ``length`` tokens (0: to the
    longest)."""
    device, coord = next(model.parameters()).device, coordinates(grids, length)
    lengths = torch.tensor([h * w for h, w in grids])
    pixels = model.embeds.in_chans * math.prod(model.embeds.patch_size)
    batch = {"patches": torch.randn(*coord.shape[:2], pixels), "patch_coord": coord}
    batch["patch_valid"] = torch.arange(coord.shape[1]) < lengths[:, None]
    return {name: tensor.to(device) for name, tensor in batch.items()}


def make_step(model: Any, dtype: str, phase: str) -> Callable[..., None]:
    """A function that takes one step with the model, or with what it was compiled to, on a batch of
    images.

    Its third argument is called after the backward.
    """
    device = next(model.parameters()).device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    autocast = partial(torch.autocast, device, getattr(torch, dtype), enabled=dtype != "float32")

    def step(
        run: Any, batch: dict[str, torch.Tensor], went_back: Callable[[], Any] = lambda: None
    ) -> None:
        with torch.inference_mode(phase == "infer"), autocast():
            out = run(batch)
        if phase == "train":
            nn.functional.cross_entropy(
                out.float(), torch.zeros(len(out), dtype=torch.long, device=device)
            ).backward()
            went_back()
            optimizer.step()
            optimizer.zero_grad()

    return step


@contextmanager
def _marked(embeds: nn.Module) -> Iterator[list[float]]:
    """Yields the times of a step: its start, where the embeddings' forward begins and ends and
    their backward begins.

    The embeddings run first, so their backward runs last: from the moment when the gradient of
    their output is known to the end of the backward. The last time is the step's end.
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
