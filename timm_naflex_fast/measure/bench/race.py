"""Contenders that do the same work, timed in turns: each round runs each of them once, so that noise falls on all."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..contenders import BASELINE, PLAIN_ADD

LEAST_ROUNDS = 3  # so that the median can ignore one round that something else disturbed


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Contender:
    """One code that does the work: ``run(prepare())``, of which only ``run`` is timed. ``ours``: of this package."""

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = _nothing
    ours: bool = False


@dataclass(frozen=True)
class Race:
    """A piece of work and its contenders. Ratios refer to the contenders named ``BASELINE`` and ``PLAIN_ADD``.

    Attributes:
        suite: "pos_embed", "model", "patch_embed" or "rope".
        workload: its name in the tables.
        phase: what is timed, e.g. "infer", "train", "frozen".
        batch: samples, or 0 where the work has none.
        dtype: of the tokens or the kernel, as in ``str(dtype)`` without "torch.".
        contenders: in the order of the table's rows.
        about: further facts, e.g. ``{"tokens": 16384}``. ``"x_bytes"``: the size that peak memory is compared with;
            ``"left_out"``: {contender: why it does not run}.
        finish: called after the last round; gives further facts.
    """

    suite: str
    workload: str
    phase: str
    batch: int
    dtype: str
    contenders: tuple[Contender, ...]
    about: dict[str, Any] = field(default_factory=dict)
    finish: Callable[[], dict[str, Any]] = dict


@dataclass(frozen=True)
class Row:
    """One contender's result; suite, workload, phase, batch, dtype and about are its race's.

    Attributes:
        median_ms: over the rounds.
        times_faster: the baseline's median over this one's, in the same run; None without a baseline.
        times_plain_add: this median over that of one plain add; None where that did not run.
        spread: the middle half of the rounds lies within this share of the median; None for fewer than three rounds.
        peak_bytes: the most memory held at once beyond what there was before; None where not measured.
    """

    suite: str
    workload: str
    phase: str
    batch: int
    dtype: str
    contender: str
    rounds: int
    median_ms: float
    times_faster: float | None
    times_plain_add: float | None
    peak_bytes: int | None
    about: dict[str, Any]
    ours: bool = False
    spread: float | None = None


def on_cpu(work: Callable[[], Any]) -> float:
    """The seconds that ``work`` takes on a CPU."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def run(
    race: Race,
    rounds: int,
    *,
    warmup: int = 1,
    budget: float | None = None,
    stopwatch: Callable[[Callable[[], Any]], float] = on_cpu,
    peak_memory: Callable[[Contender], int | None] | None = None,
    advance: Callable[[], Any] = _nothing,
) -> list[Row]:
    """Time each contender ``rounds`` times, in turns, after ``warmup`` rounds that do not count.

    Args:
        race: the contenders and what they do.
        rounds: at least 1.
        warmup: the first rounds compile, fill caches and map memory.
        budget: seconds; a contender that would need more (as its last warm-up shows) runs in fewer rounds, at least
            ``LEAST_ROUNDS``, spread evenly, so that a slow spell of the machine falls on all alike.
        stopwatch: runs the work that it gets and returns the seconds that took.
        peak_memory: the most bytes that a contender holds at once, measured after the timed rounds.
        advance: called after each single run.

    Returns:
        A row per contender.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in race.contenders}
    share = dict.fromkeys(seconds, rounds)
    order, shuffle = list(race.contenders), random.Random(0).shuffle
    for turn in range(warmup + rounds):
        shuffle(order)  # otherwise each would always find the caches as the same predecessor left them
        for contender in order:
            name = contender.name
            if turn >= warmup and not _runs(turn - warmup, share[name], rounds):
                continue
            taken = stopwatch(partial(contender.run, contender.prepare()))
            if turn >= warmup:
                seconds[name].append(taken)
            elif budget is not None:
                share[name] = min(rounds, max(LEAST_ROUNDS, int(budget / max(taken, 1e-9))))
            advance()
    peaks = {c.name: peak_memory(c) if peak_memory else None for c in race.contenders}
    race.about.update(race.finish())
    return list(_rows(race, seconds, peaks))


def _runs(turn: int, share: int, rounds: int) -> bool:
    """Whether ``turn`` is one of ``share`` turns spread evenly over ``rounds``."""
    return (turn + 1) * share // rounds > turn * share // rounds


def _rows(race: Race, seconds: dict[str, list[float]], peaks: dict[str, int | None]) -> Iterator[Row]:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    baseline, plain = medians.get(BASELINE), medians.get(PLAIN_ADD)
    for contender in race.contenders:
        name, median = contender.name, medians[contender.name]
        yield Row(
            *(race.suite, race.workload, race.phase, race.batch, race.dtype),
            contender=name,
            rounds=len(seconds[name]),
            median_ms=1e3 * median,
            times_faster=None if baseline is None else baseline / median,
            times_plain_add=None if plain is None else median / plain,
            peak_bytes=peaks[name],
            about=race.about,
            ours=contender.ours,
            spread=_spread(seconds[name]),
        )


def _spread(values: Sequence[float]) -> float | None:
    """The distance between the quartiles over the median; None for fewer than three values."""
    if len(values) < 3:
        return None
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / median if median else None
