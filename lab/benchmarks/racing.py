"""Contenders that do the same work, timed in turns within a budget of seconds."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.benchmark.utils.timer import timer as now

from timm_naflex_fast.commands.measure.bench.model import quartiles

Row = dict[str, Any]  # a contender in a race, as result files hold it

WARMUPS = 1  # rounds that do not count
LEAST_ROUNDS = 3  # so that the median can ignore one round that something else disturbed
NEAREST_32_MIB = 31 * 2**20


@dataclass(frozen=True)
class Timed:
    """One code that does the work: ``run(prepare())``, of which only ``run`` is timed."""

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Race:
    """Contenders that do the same work.

    Attributes:
        suite: "model", "pos_embed", "exported", "patch_embed", "rope" or "transformers".
        workload: its name in the tables.
        phase: what is timed, e.g. "infer", "train", "frozen".
        batch: samples, or 0 where the work has none.
        dtype: of the tokens or the kernel, as in ``str(dtype)`` without "torch.".
        contenders: in the order of the table's rows.
        about: further facts, e.g. ``{"tokens": 16384}``.
    """

    suite: str
    workload: str
    phase: str
    batch: int
    dtype: str
    contenders: tuple[Timed, ...]
    about: dict[str, Any] = field(default_factory=dict)


def run(race: Race, rounds: int, budget: float = math.inf) -> list[Row]:
    """Time each contender ``rounds`` times, in turns, after warm-up rounds that do not count.

    Args:
        race: the contenders and what they do.
        rounds: at least 2.
        budget: seconds; a contender that would need more (as its fastest call so far shows) runs in
            fewer rounds, at least ``LEAST_ROUNDS``, spread evenly, so that a slow spell of the
            machine falls on all alike.

    Returns:
        A row for each contender.
    """
    # glibc keeps freed blocks for the next caller only up to the size of the largest block that was
    # freed so far, 32 MiB at most; larger ones go back to Linux, which clears each new one page by
    # page. A process in which a model has run has freed such a block, so free one here too: all
    # contenders find the same allocator.
    torch.empty(NEAREST_32_MIB, dtype=torch.uint8)
    times: dict[str, list[float]] = {contender.name: [] for contender in race.contenders}
    fastest = dict.fromkeys(times, math.inf)
    order = [*race.contenders]
    shuffle = random.Random(0).shuffle
    for turn in range(-WARMUPS, rounds):
        # In a fixed order each would find the caches as the same predecessor left them.
        shuffle(order)
        for contender in order:
            name = contender.name
            affordable = max(LEAST_ROUNDS, budget / max(fastest[name], 1e-9))
            if turn >= 0 and not _takes_part(turn, int(min(rounds, affordable)), rounds):
                continue
            seconds = _time(contender)
            fastest[name] = min(fastest[name], seconds)
            if turn >= 0:
                times[name].append(seconds)
    facts = dict(vars(race))
    del facts["contenders"]
    rows = []
    for name, timed in times.items():
        figures = {"contender": name, "rounds": len(timed)}
        rows.append(facts | figures | quartiles(timed))
    return rows


def _takes_part(turn: int, some: int, rounds: int) -> bool:
    """Whether this turn is one of ``some``, spread evenly over all ``rounds``.

    >>> [turn for turn in range(10) if _takes_part(turn, 3, 10)]
    [3, 6, 9]
    """
    return (turn + 1) * some // rounds > turn * some // rounds


def _time(contender: Timed) -> float:
    argument = contender.prepare()
    start = now()
    contender.run(argument)
    return now() - start


def time_race(race: Race, budget: float, tiny: bool, rounds: int = 30) -> list[Row]:
    """The rows of a race; ``tiny``: of two rounds."""
    if tiny:
        return run(race, 2, budget=0.01)
    return run(race, rounds, budget=budget)
