"""Clocks and memory: how long a device needed, and how many bytes a GPU held at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

WARMUPS = {"cpu": 1, "cuda": 3}  # on a GPU the first run compiles
QUEUED_BYTES = 2**31  # writing them takes the GPU about a millisecond, and empties its caches


def mark(device: str) -> Any:
    """The present point in time; on a GPU the one at which the work given to it so far will be done."""
    if device != "cuda":
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


def stopwatch(device: str) -> Callable[[Callable[[], Any]], float]:
    """A function that runs a piece of work and returns the seconds that it took on the device, "cpu" or "cuda".

    A GPU first gets other work for some milliseconds, as a model's earlier layers would give it. While it is busy
    the host puts the measured work into the queue. Work that waits for the GPU loses this lead, and its time shows it.
    The caches are cold for every contender.
    """
    ahead = torch.empty(QUEUED_BYTES // 2 if device == "cuda" else 0, dtype=torch.uint8, device=device)

    def timed(work: Callable[[], Any]) -> float:
        if device == "cuda":
            torch.cuda.synchronize()
            for _ in range(4):
                ahead.zero_()
        start = mark(device)
        work()
        return seconds(start, mark(device))

    return timed


def peak_memory(work: Callable[[], Any]) -> int:
    """Run some work and return the most bytes that it held at once on the GPU, beyond what was held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
