"""The most memory a piece of work holds at once, beyond what there was before."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from .race import Contender


def peak_memory(device: torch.device) -> Callable[[Contender], int | None]:
    """A function that runs a contender once and says the most bytes it held at once; None where that is not known.

    On CUDA this is the allocator's own high-water mark; on CPU it is summed up from the profiler's record of every
    allocation and release, temporaries inside operators included.
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
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would talk between the tables
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work(argument)
    try:
        events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        changes = [event.nbytes() for event in events]
    except AttributeError:  # a private interface: another torch may not have it
        return None
    live = peak = 0
    for change in changes:
        live += change
        peak = max(peak, live)
    return peak
