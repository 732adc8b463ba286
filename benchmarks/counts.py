"""Count what one step of the position embedding would cost on a GPU: see ``timm_naflex_fast/measure/counts.py``.

uv run benchmarks/measure.py counts

timm's code and ``eager`` read coordinates, and so run on numbers. The traceable form, which graphs hold and CUDA graphs
capture, reads none: it runs on PyTorch's fake tensors, which have no numbers.

The operators do not depend on the number of channels, so bytes are linear in it: each step is counted at two small
widths and extended to 768.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from itertools import product, repeat
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from timm_naflex_fast.measure.bench.pos_embed import plain_add, timed
from timm_naflex_fast.measure.bench.race import PLAIN_ADD
from timm_naflex_fast.measure.bench.workloads import WORKLOADS
from timm_naflex_fast.measure.contenders import use
from timm_naflex_fast.measure.counts import counting

TRACEABLE = "matmul, traceable"
CONTENDERS = ("stock", "timm-flag-bilinear", "matmul", TRACEABLE, PLAIN_ADD)
NARROW = (16, 32)  # channels; with fewer, a token is no larger than its coordinates


def count_step(name: str, workload: str, batch: int, phase: str, channels: int) -> dict[str, int]:
    """The cost of one step of a contender at ``channels``. It has run before, so its caches are full."""
    with FakeTensorMode() if name == TRACEABLE else nullcontext(), ExitStack() as on:
        embeds, coord = WORKLOADS[workload].embeds(channels), next(WORKLOADS[workload].coordinates(batch))
        x, g = (torch.zeros(*coord.shape[:2], channels) for _ in "xg")
        if name == PLAIN_ADD:
            contender = plain_add(x, x.clone(), g if phase == "train" else None)
        else:
            on.enter_context(use(name.split(",")[0], embeds))
            values = repeat(embeds.pos_embed.detach() * 2)  # a table that does not stay is not cached
            contender = timed(name, embeds, repeat(coord), x, g if phase == "train" else None, values)
        if name != "stock":  # which caches nothing, and takes long
            contender.run(contender.prepare())
        argument = contender.prepare()
        with counting() as count:
            contender.run(argument)
    return count


def count_race(
    workload: str, batch: int, phase: str, contenders: Sequence[str] = CONTENDERS, channels: int = 768
) -> list[dict[str, Any]]:
    """A row per contender: what the race is, and its counts at ``channels``, where the line through two widths leads.

    Raises:
        ValueError: the operators depend on the channels.
    """
    grids, rows, (low, high) = WORKLOADS[workload].grids(batch), [], NARROW
    about = dict(workload=workload, phase=phase, batch=batch, dtype="float32", channels=channels)
    about |= dict(tokens=sum(h * w for h, w in grids), grids=len(set(grids)))
    for name in contenders:
        small, large = (count_step(name, workload, batch, phase, width) for width in NARROW)
        if any(small[key] != large[key] for key in ("operators", "host_waits")):
            raise ValueError(f"the operators of {name} depend on the channels: {small}, {large}")
        counts = {key: n + (large[key] - n) * (channels - low) // (high - low) for key, n in small.items()}
        rows.append({**about, "contender": name, **counts})
    return rows


def rows(tiny: bool) -> Iterator[list[dict[str, Any]]]:
    """The rows of race after race."""
    for workload, phase in product(("siglip", "diverse"), ("infer", "train")):
        yield count_race(workload, 2 if tiny else 512, phase)
