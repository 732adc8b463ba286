"""Contenders that do the same work, timed in turns: one round runs each once, so that noise falls on all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

BASELINE, FLOOR = "stock", "floor"


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Contender:
    """One way to do the work: ``run(prepare())``, of which only ``run`` is timed."""

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = _nothing


@dataclass(frozen=True)
class Race:
    """A piece of work and those who do it. ``BASELINE`` and ``FLOOR`` among the names are what ratios refer to.

    Args:
        suite: "pos_embed", "patch_embed" or "rope".
        workload: its name in the tables.
        phase: what is timed, e.g. "infer", "train", "frozen".
        batch: samples, or 0 where the work has none.
        dtype: of the tokens or the kernel, as in ``str(dtype)`` without "torch.".
        contenders: in the order in which tables show them.
        about: further columns, e.g. ``{"tokens": 16384}``.
    """

    suite: str
    workload: str
    phase: str
    batch: int
    dtype: str
    contenders: tuple[Contender, ...]
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One contender's result: median over the rounds; ratios from the same run, None where nothing to refer to ran."""

    suite: str
    workload: str
    phase: str
    batch: int
    dtype: str
    contender: str
    rounds: int
    median_ms: float
    times_faster: float | None
    times_floor: float | None
    peak_bytes: int | None
    about: dict[str, Any]


def run(
    race: Race,
    rounds: int,
    *,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    synchronize: Callable[[], Any] = _nothing,
    peak_memory: Callable[[Contender], int] | None = None,
    advance: Callable[[], Any] = _nothing,
) -> list[Row]:
    """Time every contender ``rounds`` times, interleaved, after ``warmup`` rounds that do not count.

    Args:
        clock: seconds.
        synchronize: called before each reading of the clock (a GPU's queue).
        peak_memory: bytes a contender has allocated at most at once, measured outside the timed rounds.
        advance: called after each single run (a progress bar).
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in race.contenders}
    for turn in range(warmup + rounds):
        for contender in race.contenders:
            argument = contender.prepare()
            synchronize()
            start = clock()
            contender.run(argument)
            synchronize()
            taken = clock() - start
            del argument
            if turn >= warmup:
                seconds[contender.name].append(taken)
            advance()
    peaks = {c.name: peak_memory(c) if peak_memory else None for c in race.contenders}
    return list(_rows(race, seconds, peaks))


def _rows(race: Race, seconds: dict[str, list[float]], peaks: dict[str, int | None]) -> Iterator[Row]:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    baseline, floor = medians.get(BASELINE), medians.get(FLOOR)
    for name, median in medians.items():
        yield Row(
            suite=race.suite,
            workload=race.workload,
            phase=race.phase,
            batch=race.batch,
            dtype=race.dtype,
            contender=name,
            rounds=len(seconds[name]),
            median_ms=1e3 * median,
            times_faster=None if baseline is None else baseline / median,
            times_floor=None if floor is None else median / floor,
            peak_bytes=peaks[name],
            about=race.about,
        )
