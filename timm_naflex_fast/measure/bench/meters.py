"""Clocks and memory: how long a device needed, and how many bytes were held at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from .race import Contender

WARMUPS = {"cpu": 1, "cuda": 3}  # on a GPU the first run compiles
QUEUED_BYTES = 2**31  # writing them takes the GPU about a millisecond, and empties its caches


class Marks:
    """Points in time of a device: the clock on a CPU, events in the queue on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        """The present point in time; on a GPU the one at which the work given to it so far will be done."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to a later one."""
        if not self._cuda:
            return end - start
        end.synchronize()
        return 1e-3 * start.elapsed_time(end)


def stopwatch(device: torch.device) -> Callable[[Callable[[], Any]], float] | None:
    """A function that runs a piece of work and returns the seconds it took on a GPU; None on a CPU.

    The GPU first gets other work for some milliseconds, as a model's earlier layers would give it. While it is busy
    the host puts the measured work into the queue. Work that waits for the GPU loses this lead, and its time shows it.
    The caches are cold for every contender.
    """
    if device.type != "cuda":
        return None
    ahead, marks = torch.empty(QUEUED_BYTES // 2, dtype=torch.uint8, device=device), Marks(device)

    def seconds(work: Callable[[], Any]) -> float:
        torch.cuda.synchronize(device)
        for _ in range(4):
            ahead.zero_()
        start = marks.mark()
        work()
        return marks.seconds(start, marks.mark())

    return seconds


def peak_memory(device: torch.device) -> Callable[[Contender], int | None]:
    """A function that runs a contender once and returns the most bytes it held at once; None where not known.

    CUDA's allocator keeps that number. On a CPU the profiler records every allocation and release, also inside
    operators, and their running sum has a maximum.
    """

    def measure(contender: Contender) -> int | None:
        argument = contender.prepare()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            contender.run(argument)
            torch.cuda.synchronize(device)
            return torch.cuda.max_memory_allocated(device) - before
        return _profiled_peak(contender.run, argument)

    return measure


def _profiled_peak(work: Callable[[Any], Any], argument: Any) -> int | None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints between the tables
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work(argument)
    try:
        events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        changes = [event.nbytes() for event in events]
    except AttributeError:  # a private interface, which another torch may not have
        return None
    live = peak = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    return peak
