"""Races: several codes do the same work, and are timed in turns.

Tests: tests/commands/measure/test_racing.py.
"""

import random
import signal
import statistics
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from typing import Any, TypeVar

import torch
from torch.utils.benchmark.utils.timer import timer as now

from .output import progress

PROCESSES = 5  # of each side
NEAREST_32_MIB = 31 * 2**20
QUARTILES = ("first_quartile_ms", "median_ms", "third_quartile_ms")
Figures = dict[str, float]
Ready = Callable[[], Callable[[], Any]]  # readies one round, and returns what is timed
Found = TypeVar("Found")


def race(sides: Mapping[str, Ready], rounds: int) -> dict[str, Figures]:
    """Time all sides in turns, after one round that does not count.

    Args:
        sides: by their names.
        rounds: that count, at least 2.

    Returns:
        Of each side the number of "rounds", and the quartiles of their times.
    """
    # glibc keeps freed blocks for the next caller only up to the size of the largest block that was
    # freed so far, 32 MiB at most; larger ones go back to Linux, which clears each new one page by
    # page. A process in which a model has run has freed such a block, so free one here too: every
    # race finds the same allocator.
    torch.empty(NEAREST_32_MIB, dtype=torch.uint8)
    times: dict[str, list[float]] = {name: [] for name in sides}
    order = [*sides]
    shuffle = random.Random(0).shuffle
    for _ in progress("timing", range(1 + rounds)):
        # In a fixed order each would find the caches as the same predecessor left them.
        shuffle(order)
        for name in order:
            work = sides[name]()
            start = now()
            work()
            times[name].append(now() - start)
    return {name: quartiles(seconds[1:]) for name, seconds in times.items()}


def quartiles(seconds: Sequence[float]) -> Figures:
    """How many times there are, their median, and between which half of them lie."""
    cuts = statistics.quantiles(seconds, n=4, method="inclusive")
    return {"rounds": len(seconds), **{name: 1e3 * cut for name, cut in zip(QUARTILES, cuts)}}


def in_new_processes(sides: Mapping[str, Callable[[], Found]]) -> dict[str, list[Found]]:
    """What each side returns, ``PROCESSES`` times, each time in a new process; the sides in turns.

    Where the heap of a process lies changes times by 5 %, so one process decides nothing.

    Args:
        sides: functions that another process can import, with their arguments (``partial``).
    """
    found: dict[str, list[Found]] = {name: [] for name in sides}
    # Ctrl-C is for the process that waits here: it ends the others.
    ignore = (signal.SIGINT, signal.SIG_IGN)
    with get_context("spawn").Pool(1, signal.signal, ignore, maxtasksperchild=1) as pool:
        for _ in progress("processes", range(PROCESSES)):
            for name, side in sides.items():
                found[name].append(pool.apply(side))
    return found


def over_processes(runs: Sequence[Figures]) -> Figures:
    """The median of each figure, and the range of the times: of ``median_ms`` in each process."""
    figures = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    times = [run["median_ms"] for run in runs]
    return {"processes": len(runs), "lowest_ms": min(times), "highest_ms": max(times), **figures}
