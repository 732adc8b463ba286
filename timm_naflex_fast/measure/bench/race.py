"""Contenders that do the same work, timed in turns: each round runs each of them once, so that noise falls on all.

And the table of what came out.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..contenders import BASELINE, PLAIN_ADD
from ..output import number, print_table

WARMUPS = {"cpu": 1, "cuda": 3}  # on a GPU the first run compiles
QUEUED_BYTES = 2**31  # writing them takes the GPU about a millisecond, and empties its caches
LEAST_ROUNDS = 3  # so that the median can ignore one round that something else disturbed
DISTURBED = 2.0  # a median so many times the fastest round is measured again


@dataclass(frozen=True)
class Timed:
    """One code that does the work: ``run(prepare())``, of which only ``run`` is timed."""

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Race:
    """Contenders that do the same work. Ratios refer to those named ``BASELINE`` and ``PLAIN_ADD``.

    Attributes:
        suite: "pos_embed", "model", "patch_embed" or "rope".
        workload: its name in the tables.
        phase: what is timed, e.g. "infer", "train", "frozen".
        batch: samples, or 0 where the work has none.
        dtype: of the tokens or the kernel, as in ``str(dtype)`` without "torch.".
        contenders: in the order of the table's rows.
        about: further facts, e.g. ``{"tokens": 16384}``. ``"x_bytes"``: the tokens' memory;
            ``"left_out"``: {contender: why it does not run}.
    """

    suite: str
    workload: str
    phase: str
    batch: int
    dtype: str
    contenders: tuple[Timed, ...]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The race in words, e.g. "pos_embed siglip train, B=64, float32, 16x16 bilinear, 51 grids, 15,000 tokens"."""
        words = [f"{self.suite} {self.workload} {self.phase}", f"B={self.batch}" if self.batch else "", self.dtype]
        words += [self.about.get("model", ""), self.about.get("table", "")]
        words += [f"{self.about[key]:,} {key}" for key in ("grids", "tokens") if key in self.about]
        return ", ".join(filter(None, [*words, self.about.get("device")]))


def run(
    race: Race,
    rounds: int,
    *,
    device: str = "cpu",
    budget: float = math.inf,
    advance: Callable[[float], Any] = lambda share: None,
) -> list[dict[str, Any]]:
    """Time each contender ``rounds`` times, in turns, after warm-up rounds that do not count.

    Where some contender's rounds differ too much, all run as many rounds again, once.

    Args:
        race: the contenders and what they do.
        rounds: at least 1.
        device: "cpu" or "cuda".
        budget: seconds; a contender that would need more (as its fastest call so far shows) runs in fewer rounds, at
            least ``LEAST_ROUNDS``, spread evenly, so that a slow spell of the machine falls on all alike.
        advance: called with the share of the race that was done since its last call, 1 in all.

    Returns:
        A row per contender, as result files hold it: the fields of the race, and

        - median_ms: over the rounds.
        - times_faster: the baseline's median over this one's, in the same run; None without a baseline.
        - times_plain_add: this median over that of one plain add; None where that did not run.
        - spread: the middle half of the rounds lies within this share of the median; None for fewer than three rounds.
        - peak_bytes: the most memory held at once beyond what there was before; None where not measured.
    """
    timed, times = stopwatch(device), {contender.name: list[float]() for contender in race.contenders}
    fastest = dict.fromkeys(times, math.inf)
    order, shuffle = list(race.contenders), random.Random(0).shuffle
    for first in (-WARMUPS[device], 0):
        if first == 0 and all(statistics.median(values) <= DISTURBED * min(values) for values in times.values()):
            break
        for turn in range(first, rounds):
            shuffle(order)  # otherwise each would always find the caches as the same predecessor left them
            for contender in order:
                name = contender.name
                share = int(min(rounds, max(LEAST_ROUNDS, budget / max(fastest[name], 1e-9))))
                if turn < 0 or (turn + 1) * share // rounds > turn * share // rounds:  # spread evenly over the rounds
                    taken = timed(partial(contender.run, contender.prepare()))
                    fastest[name] = min(fastest[name], taken)
                    if turn >= 0:
                        times[name].append(taken)
                if first < 0:
                    advance(1 / len(order) / (rounds - first))
    medians = {name: statistics.median(values) for name, values in times.items()}
    baseline, plain = medians.get(BASELINE), medians.get(PLAIN_ADD)
    peaks = {one.name: peak_memory(partial(one.run, one.prepare())) for one in order} if device == "cuda" else {}
    work = {key: value for key, value in vars(race).items() if key != "contenders"}
    return [
        work
        | dict(
            contender=name,
            rounds=len(times[name]),
            median_ms=1e3 * median,
            times_faster=baseline and baseline / median,
            times_plain_add=plain and median / plain,
            spread=_spread(times[name]) / median if len(times[name]) > 2 else None,
            peak_bytes=peaks.get(name),
        )
        for name, median in medians.items()
    ]


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


def _spread(values: Sequence[float]) -> float:
    """The distance between the quartiles."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def _saved(stock: dict[str, Any], own: dict[str, Any]) -> str:
    """The share of timm's time that a contender saves, or why it cannot be told from the noise.

    A model's step may differ by more than its embeddings do: that too is noise, since nothing else has changed.
    """
    saved = 1 - own["median_ms"] / stock["median_ms"]
    noise = spread = max(stock["spread"] or 0, own["spread"] or 0)
    if shares := own["about"].get("embeds_share"):
        before, after = shares[BASELINE], shares[own["contender"]]
        if saved > before + spread:
            return "disturbed: run again"  # more than timm's embeddings take
        noise = max(noise, abs(saved - (before - after * (1 - saved))))
    if min(stock["rounds"], own["rounds"]) < 3:
        return "too few rounds"
    return f"{100 * saved:.1f} %" if abs(saved) > noise else "within noise"


def print_race(title: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows of one race, without columns that have no figure."""
    stock = next((row for row in rows if row["contender"] == BASELINE), None)
    lines = []
    for row in rows:
        share = row["about"].get("embeds_share", {}).get(row["contender"])
        line = {
            "contender": row["contender"],
            "median ms": number(row["median_ms"]),
            f"times faster than {BASELINE}": row["times_faster"] and number(row["times_faster"]),
            "times one plain add": row["times_plain_add"] and number(row["times_plain_add"]),
            "share of embeddings": share and f"{100 * share:.1f} %",
            "extra peak MB": row["peak_bytes"] is not None and f"{row['peak_bytes'] / 1e6:,.1f}",
            "rounds": str(row["rounds"]),
            "spread": row["spread"] is not None and f"{100 * row['spread']:.0f} %",
            "time saved": stock and row["contender"] not in (BASELINE, PLAIN_ADD) and _saved(stock, row),
        }
        lines.append({heading: text for heading, text in line.items() if text})
    print(title)
    print_table(lines)
    print(flush=True)
