"""Clocks and memory: how long a device needed, and how many bytes were held at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from .race import Contender, on_cpu

WARMUPS = {"cpu": 1, "cuda": 3}  # on a GPU the first run compiles
QUEUED_BYTES = 2**31  # writing them takes the GPU about a millisecond, and empties its caches


def mark(device: torch.device) -> Any:
    """The present point in time; on a GPU the one at which the work given to it so far will be done."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds(start: Any, end: Any) -> float:
    """From one mark to a later one."""
    if not isinstance(end, torch.cuda.Event):
        return end - start
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)


def stopwatch(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    """A function that runs a piece of work and returns the seconds that it took on the device.

    A GPU first gets other work for some milliseconds, as a model's earlier layers would give it. While it is busy
    the host puts the measured work into the queue. Work that waits for the GPU loses this lead, and its time shows it.
    The caches are cold for every contender.
    """
    if device.type != "cuda":
        return on_cpu
    ahead = torch.empty(QUEUED_BYTES // 2, dtype=torch.uint8, device=device)

    def on_gpu(work: Callable[[], Any]) -> float:
        torch.cuda.synchronize(device)
        for _ in range(4):
            ahead.zero_()
        start = mark(device)
        work()
        return seconds(start, mark(device))

    return on_gpu


def peak_memory(device: torch.device) -> Callable[[Contender], int | None]:
    """A function that runs a contender once and returns the most bytes it held at once; None where not known.

    CUDA's allocator keeps that number. On a CPU the profiler records every allocation and release, also inside
    operators, and their running sum has a maximum.
    """

    def on_gpu(contender: Contender) -> int:
        argument = contender.prepare()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        contender.run(argument)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before

    return on_gpu if device.type == "cuda" else _profiled_peak


def _profiled_peak(contender: Contender) -> int | None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it prints between the tables
    from torch.profiler import ProfilerActivity, profile

    argument = contender.prepare()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        contender.run(argument)
    try:
        events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    except AttributeError:  # a private interface, which another torch may not have
        return None
    return max(accumulate(changes), default=0)
