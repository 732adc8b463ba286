"""Whole models, eager and compiled: a training step or an inference.

| phase | what is timed |
| --- | --- |
| train | forward, cross entropy over the classes, backward, AdamW's step, zeroing the gradients |
| infer | the forward pass, eval mode, under ``torch.inference_mode`` |

The batch has random patches, padded and numbered as timm's NaFlex collator does it. A dtype other
than float32 runs under autocast.
"""

import math
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ....patching.install import enable
from ..racing import Figures, in_new_processes, now, over_processes, race
from .workloads import Grid, coordinates, siglip_grids

BACKEND = "inductor"
ROUNDS = 10
Batch = dict[str, Tensor]
Load = Callable[[], tuple[Any, str]]  # ``load_model`` with its arguments
Step = Callable[[Any, Batch], None]  # see ``make_step``


def race_eager(model: Any, modes: Sequence[Any], **work: Any) -> dict[str, Figures]:
    """Time ``ROUNDS`` steps in each mode, on one batch; ``work`` as in :func:`time_compiled`."""
    model.to(work["device"])
    step = make_step(model, work["dtype"], work["phase"])
    batch = random_batches(model, work["lengths"], work["images"])[0]

    with ExitStack() as stack:

        def ready(mode: Any) -> Callable[[], None]:
            stack.close()  # ends the mode before
            stack.enter_context(enable(mode, model=model))
            return partial(step, model, batch)

        return race({mode: partial(ready, mode) for mode in modes}, ROUNDS)


def race_compiled(load: Load, modes: Sequence[Any], **work: Any) -> dict[str, Figures]:
    """Time the model that ``load`` returns as compiled in each mode, in processes of their own."""
    sides = {}
    for mode in modes:
        sides[mode] = partial(time_compiled, load, mode, backend=BACKEND, **work)
    found = in_new_processes(sides)
    return {mode: over_processes(runs) for mode, runs in found.items()}


def time_compiled(
    load: Load,
    mode: Any,
    *,
    device: str,
    dtype: str,
    phase: str,
    lengths: Sequence[int],
    images: int,
    backend: str,
) -> Figures:
    """Time a model as ``torch.compile`` makes it in a mode, and count its graphs.

    On the first half of the batches it is compiled. The later steps are timed in ``ROUNDS`` rounds,
    each of which counts as the mean of its steps.
    """
    from torch._inductor.utils import fresh_inductor_cache

    model, _ = load()
    model.to(device)
    step = make_step(model, dtype, phase)
    batches = random_batches(model, lengths, images)
    # What an earlier run has compiled would hide what compiling costs.
    with enable(mode, model=model), fresh_inductor_cache():
        counts, seconds = count_graphs(model, batches, step, backend=backend)
    first, later = torch.tensor(seconds).chunk(2)
    return {
        "median_ms": 1e3 * later.view(ROUNDS, -1).mean(1).median().item(),
        **counts,
        "first steps": len(first),
        "first steps, s": round(first.sum().item(), 2),
    }


def count_graphs(
    model: Any, batches: Sequence[Any], step: Callable[..., Any], **options: Any
) -> tuple[Figures, list[float]]:
    """Compile a model, and run ``step(compiled, batch)`` for each batch.

    Args:
        model: any module.
        batches: as ``step`` takes them.
        step: runs the compiled model.
        options: of ``torch.compile``.

    Returns:
        The numbers of "graphs", "breaks" (where TorchDynamo leaves the graph), "graphs after the
        first batch"; and the seconds of each step.
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
    }, seconds


def random_batches(model: Any, lengths: Sequence[int], images: int) -> list[Batch]:
    """In each of 2 x ``ROUNDS`` rounds a batch of random images for each length, padded to it; no
    image comes twice.
    """
    source = random.Random(0)
    batches = []
    for _, length in product(range(2 * ROUNDS), lengths):
        draw = siglip_grids(length)
        grids = [draw(source) for _ in range(images)]
        batches.append(random_batch(model, grids, length))
    return batches


def random_batch(model: Any, grids: Sequence[Grid], length: int = 0) -> Batch:
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
        lengths = torch.tensor(grids).prod(1)
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

    def step(run: Any, batch: Batch) -> None:
        with torch.inference_mode(not is_training), autocast():
            out = run(batch)
        if is_training:
            # Any class will do: a step takes as long, whatever it learns.
            chances = out.float().log_softmax(-1)  # (B, classes); (B, N, C) if nothing is pooled
            (-chances[..., 0].mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    model.train(is_training)
    return step
