"""Time on a GPU, by its own clock, and who makes the host wait for it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .race import Contender

QUEUED_BYTES = 2**31  # about a millisecond of writing: time for the host to get ahead; empties the caches too


def stopwatch() -> Callable[[Callable[[], Any]], float]:
    """A function that says how many seconds of the GPU's time a piece of work took.

    The GPU is kept busy while the host puts the work into its queue, as in a model, where the layers before it do so.
    Work that waits for the GPU gives that lead away, and is charged for it. The caches are cold for everybody.
    """
    ahead = torch.empty(QUEUED_BYTES // 2, dtype=torch.uint8, device="cuda")

    def seconds(work: Callable[[], Any]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        for _ in range(4):
            ahead.zero_()
        start.record()
        work()
        end.record()
        end.synchronize()
        return 1e-3 * start.elapsed_time(end)

    return seconds


def who_waits(contenders: Iterable[Contender]) -> list[str]:
    """The names of those whose work makes the host wait for the GPU: PyTorch's own check, as an error."""
    waiting = []
    for contender in contenders:
        argument = contender.prepare()
        torch.cuda.synchronize()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that the check is a prototype
                torch.cuda.set_sync_debug_mode("error")
            contender.run(argument)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            waiting.append(contender.name)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
    return waiting
