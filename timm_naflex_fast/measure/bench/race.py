"""Contenders that do the same work, timed in turns: one round runs each once, so that noise falls on all alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ...patching.modes import PATCH_EMBED, POS_EMBED, ROPE

BASELINE, FLOOR = "stock", "floor"
STRATEGIES = {*POS_EMBED, *PATCH_EMBED, *ROPE} - {BASELINE}


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Contender:
    """One way to do the work: ``run(prepare())``, of which only ``run`` is timed.

    ``ours`` says whether a loss against ``BASELINE`` is to be reported; None: the name's first word is a strategy's.
    """

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = _nothing
    ours: bool | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this is a strategy of this package."""
        return self.name.split()[0] in STRATEGIES if self.ours is None else self.ours


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
        about: further columns, e.g. ``{"tokens": 16384}``. ``"x_bytes"``: what peak memory is compared with;
            ``"left_out"``: {contender: why it does not run}.
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
    ours: bool = False


def run(race: Race, rounds: int, **options: Any) -> list[Row]:
    """Time every contender ``rounds`` times, interleaved; options as in :func:`run_together`."""
    return run_together([race], rounds, **options)[0]


def run_together(
    races: Sequence[Race],
    rounds: int,
    *,
    warmup: int = 1,
    budget: float | None = None,
    min_rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
    stopwatch: Callable[[Callable[[], Any]], float] | None = None,
    peak_memory: Callable[[Contender], int | None] | None = None,
    advance: Callable[[], Any] = _nothing,
) -> list[list[Row]]:
    """Time the contenders of all races ``rounds`` times, interleaved, after ``warmup`` rounds that do not count.

    Args:
        races: more than one, so that times of one can be compared with those of another (batch sizes).
        budget: seconds; a contender that its warm-up shows to need more runs in fewer rounds, at least ``min_rounds``,
            spread evenly over the whole, so that a machine that is slower for a while is so for all alike.
            Three, so that a median can pass over one that something else disturbed. Without a warm-up there is none.
        clock: seconds.
        stopwatch: runs what it is given and says how many seconds that took; by default told from the clock.
        peak_memory: bytes a contender has allocated at most at once, measured outside the timed rounds.
        advance: called after each single run (a progress bar).

    Returns:
        The rows of each race.
    """
    entered = [(place, contender) for place, race in enumerate(races) for contender in race.contenders]
    seconds: dict[tuple[int, str], list[float]] = {(place, contender.name): [] for place, contender in entered}
    share = dict.fromkeys(seconds, rounds)
    order, shuffle = list(entered), random.Random(0).shuffle
    for turn in range(warmup + rounds):
        shuffle(order)  # no contender always follows the same one, with its leavings in the caches
        for place, contender in order:
            who = place, contender.name
            if turn >= warmup and not _runs(turn - warmup, share[who], rounds):
                continue
            argument = contender.prepare()
            if stopwatch is None:
                start = clock()
                contender.run(argument)
                taken = clock() - start
            else:
                taken = stopwatch(partial(contender.run, argument))
            if turn >= warmup:
                seconds[who].append(taken)
            elif budget is not None:
                share[who] = min(rounds, max(min_rounds, int(budget / max(taken, 1e-9))))
            del argument
            advance()
    peaks = {(place, c.name): peak_memory(c) if peak_memory else None for place, c in entered}
    return [
        list(_rows(race, *({c.name: found[place, c.name] for c in race.contenders} for found in (seconds, peaks))))
        for place, race in enumerate(races)
    ]


def _runs(turn: int, share: int, rounds: int) -> bool:
    """Whether ``turn`` is one of ``share`` turns spread evenly over ``rounds``."""
    return (turn + 1) * share // rounds > turn * share // rounds


def _rows(race: Race, seconds: dict[str, Any], peaks: dict[str, Any]) -> Iterator[Row]:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    baseline, floor = medians.get(BASELINE), medians.get(FLOOR)
    for contender in race.contenders:
        median = medians[contender.name]
        yield Row(
            suite=race.suite,
            workload=race.workload,
            phase=race.phase,
            batch=race.batch,
            dtype=race.dtype,
            contender=contender.name,
            rounds=len(seconds[contender.name]),
            median_ms=1e3 * median,
            times_faster=None if baseline is None else baseline / median,
            times_floor=None if floor is None else median / floor,
            peak_bytes=peaks[contender.name],
            about=race.about,
            ours=contender.is_ours,
        )
