"""Codes that do the same work in turns, and what comes out: rows of figures, and their table."""

import math
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ....text_table import table
from ..contenders import BASELINE
from ..output import number

Row = dict[str, Any]  # a contender in a race, as result files hold it: see ``rows``

WARMUPS = 1  # rounds that do not count
TITLE = "{suite} {workload} {phase}, B={batch}, {dtype}, {model}, {device}"
LEAST_ROUNDS = 3  # so that the median can ignore one round that something else disturbed
HOW_TO_READ = (
    "In brackets: the range in which the ratio lies, as the rounds differ (95 %). Where the range "
    "holds 1,\nthese rounds cannot tell which is faster: run more of them, on a quieter machine."
)


def turns(contenders: Iterable[str], rounds: int) -> Iterator[tuple[int, str]]:
    """Who runs next: each contender once in each round, so that noise falls on all of them.

    Args:
        contenders: their names.
        rounds: that count.

    Yields:
        The number of the round, below 0 in the ``WARMUPS`` rounds before, and a contender's name.
    """
    order = [*contenders]
    shuffle = random.Random(0).shuffle
    for turn in range(-WARMUPS, rounds):
        # In a fixed order each would find the caches as the same predecessor left them.
        shuffle(order)
        for name in order:
            yield turn, name


def rows(facts: Row, times: Mapping[str, Sequence[float]]) -> list[Row]:
    """A row for each contender of a race, as result files hold it.

    Args:
        facts: of every row:

            - suite: "model", "compiled", or one of benchmarks/.
            - workload: its name in the tables.
            - phase: what is timed, e.g. "infer", "train".
            - batch: samples, or 0 where the work has none.
            - dtype: as in ``str(dtype)`` without "torch.".
            - about: further facts, e.g. ``{"device": "cpu"}``.
        times: the seconds of each contender's rounds. Ratios refer to ``BASELINE``.

    Returns:
        The facts and

        - contender: its name.
        - rounds, median_ms.
        - low_ms, high_ms: the range in which the median of many more rounds would lie (95 %; with
          fewer than eight, all the rounds).
        - times_faster: the baseline's median over this one's, in the same run; NaN without a
          baseline.
    """
    baseline = math.nan
    if BASELINE in times:
        baseline = statistics.median(times[BASELINE])
    found = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        low, high = median_range(seconds)
        figures = {
            "contender": name,
            "rounds": len(seconds),
            "median_ms": 1e3 * median,
            "low_ms": 1e3 * low,
            "high_ms": 1e3 * high,
            "times_faster": baseline / median,
        }
        found.append(facts | figures)
    return found


def median_range(seconds: Sequence[float]) -> tuple[float, float]:
    """The range of the median of many more rounds (95 %), by the normal approximation."""
    ordered = sorted(seconds)
    rounds = len(ordered)
    # Rounds that it leaves at each end.
    outside = max(0, int(rounds / 2 - 0.98 * math.sqrt(rounds)))
    return ordered[outside], ordered[-1 - outside]


def now() -> float:
    """Seconds; on a machine with a GPU, after it has done the work given to it so far."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def times_faster(stock: Row, figures: Row) -> str:
    """How many times faster than timm, between which limits; or that it cannot be told."""
    if min(stock["rounds"], figures["rounds"]) < LEAST_ROUNDS:
        return "cannot be told (too few rounds)"
    # The worst and the best that both medians allow.
    low = stock["low_ms"] / figures["high_ms"]
    high = stock["high_ms"] / figures["low_ms"]
    answer = number(stock["median_ms"] / figures["median_ms"])
    if low <= 1 <= high:
        answer = "cannot be told"
    return f"{answer} ({number(low)} to {number(high)})"


def print_race(found: Sequence[Row]) -> None:
    """Print the rows of one race of models under what they share."""
    by_name = {row["contender"]: row for row in found}
    lines = []
    for name, row in by_name.items():
        cells = {"mode": name, "median ms": number(row["median_ms"]), "rounds": str(row["rounds"])}
        # Without timm's own time there is nothing to be faster than.
        if name != BASELINE and BASELINE in by_name:
            cells[f"times faster than {BASELINE}"] = times_faster(by_name[BASELINE], row)
        counted = row["about"].get("counted", {}).get(name, {})
        lines.append(cells | {heading: f"{count:,}" for heading, count in counted.items()})
    print(TITLE.format(**found[0], **found[0]["about"]))
    print(table(lines))
    print(flush=True)
