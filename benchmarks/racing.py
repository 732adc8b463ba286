"""Contenders that do the same work, timed in turns within a budget of seconds."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from timm_naflex_fast.commands.measure.bench.race import LEAST_ROUNDS, Row, now, rows, turns

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
        rounds: at least 1.
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
    by_name = {contender.name: contender for contender in race.contenders}
    times: dict[str, list[float]] = {name: [] for name in by_name}
    fastest = dict.fromkeys(times, math.inf)
    for turn, name in turns(times, rounds):
        affordable = max(LEAST_ROUNDS, budget / max(fastest[name], 1e-9))
        if turn >= 0 and not _takes_part(turn, int(min(rounds, affordable)), rounds):
            continue
        seconds = _time(by_name[name])
        fastest[name] = min(fastest[name], seconds)
        if turn >= 0:
            times[name].append(seconds)
    facts = dict(vars(race))
    del facts["contenders"]
    return rows(facts, times)


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
    """The rows of a race; ``tiny``: of one round."""
    if tiny:
        return run(race, 1, budget=0.01)
    return run(race, rounds, budget=budget)
