"""What ``torch.compile`` makes of a model whose batches have other grids, and other lengths, each time.

Graphs, breaks and graphs that a later batch made necessary are counted by TorchDynamo itself; the first steps, with the
compilation, and the later ones are timed. Beside them stand the operators of one eager step (forward, and backward in
training), and how often it would wait for a GPU.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch._dynamo.utils import counters

from ..counts import counting
from .model import images, make_step, switch
from .race import Race, now
from .workloads import Workload

BACKEND = "inductor"


def measure(model: Any, batches: Sequence[Any], step: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Compile a model with these options of ``torch.compile``, and run ``step(compiled, batch)`` for each batch.

    Returns:
        The numbers of "graphs", "breaks" (where TorchDynamo leaves the graph), "graphs after the first batch"; and
        "seconds", a list: of each step.
    """
    torch._dynamo.reset()
    counters.clear()
    compiled, first, taken = torch.compile(model, **options), 0, []
    for batch in batches:
        start = now()
        step(compiled, batch)
        taken.append(now() - start)
        first = first or counters["stats"]["unique_graphs"]
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return {"graphs": graphs, "breaks": breaks, "graphs after the first batch": graphs - first, "seconds": taken}


def rows(
    model: Any,
    workloads: Sequence[Workload],
    batch: int,
    dtype: str,
    phase: str,
    contenders: Sequence[str],
    steps: int,
    advance: Callable[[float], Any] = lambda share: None,
) -> tuple[Race, list[dict[str, Any]]]:
    """Compile the model once for each contender: the first ``steps``, compiling included, then as many later ones.

    Each step takes one batch of each workload, with other images every time. The rows' times are of the later steps:
    milliseconds for one batch, the mean of a step's; see ``Race.rows``.
    """
    from torch._inductor.utils import fresh_inductor_cache

    turn, step, batches = len(workloads), make_step(model, dtype, phase), []
    for number in range(2 * steps * turn):
        grids = workloads[number % turn].grids((number // turn + 1) * batch)[-batch:]
        batches.append(images(model, grids, workloads[number % turn].length))
    device, times, counted = next(model.parameters()).device.type, {}, {}
    for name in contenders:
        with ExitStack() as on, fresh_inductor_cache():
            switch(model, name, phase, on)
            with ExitStack() as until_backward:
                step(model, batches[0])  # what it caches is not counted
                eager = until_backward.enter_context(counting())
                step(model, batches[0], until_backward.close)
            found = measure(model, batches, step, backend=BACKEND)
            found |= {"eager operators": eager["operators"], "eager waits": eager["host_waits"]}
        seconds = found.pop("seconds")
        first, later = seconds[: steps * turn], seconds[steps * turn :]
        times[name] = [sum(later[i : i + turn]) / turn for i in range(0, len(later), turn)]
        counted[name] = found | {"first steps": len(first), "first steps, s": sum(first)}
        advance(1 / len(contenders))
    about = dict(device=device, model=model.pretrained_cfg["architecture"], counted=counted)
    name = " ".join(dict.fromkeys(workload.name for workload in workloads))
    race = Race("compiled", name, phase, batch, dtype, (), about)
    return race, race.rows(times)
