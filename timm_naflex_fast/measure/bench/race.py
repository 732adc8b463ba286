"""Contenders that do the same work, timed in turns, and the table of what came out.

Each round runs each contender once, so that noise falls on all of them.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...text_table import table
from ..contenders import BASELINE
from ..output import number

Row = dict[str, Any]  # a contender in a race, as result files hold it: see ``Race.rows``
# Called with the share of a race that was done since its last call.
Advance = Callable[[float], Any]

WARMUPS = {"cpu": 1, "cuda": 3}
LEAST_ROUNDS = 3  # so that the median can ignore one round that something else disturbed
PRECISE = 0.02  # a whole model's step changes so little that medians have to be known so well
NEAREST_32_MIB = 31 * 2**20
HOW_TO_READ = (
    "In brackets: the range in which the ratio lies, as the rounds differ (95 %). Where the range "
    f"holds 1, or a whole model's\nmedian is not known within {100 * PRECISE:.0f} %, these rounds "
    "cannot tell which is faster: run more of them, on a quieter machine."
)


@dataclass(frozen=True)
class Timed:
    """One code that does the work: ``run(prepare())``, of which only ``run`` is timed."""

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None


@dataclass(frozen=True)
class Race:
    """Contenders that do the same work; ratios refer to the one that is named ``BASELINE``.

    Attributes:
        suite: "model", "compiled", "pos_embed", "exported", "patch_embed" or "rope".
        workload: its name in the tables.
        phase: what is timed, e.g. "infer", "train", "frozen".
        batch: samples, or 0 where the work has none.
        dtype: of the tokens or the kernel, as in ``str(dtype)`` without "torch.".
        contenders: in the order of the table's rows.
        about: further facts, e.g. ``{"tokens": 16384}``. ``"device"``: "cpu" if it is missing;
            ``"counted"``: {contender: {heading: number}}.
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
        """The race in words, e.g. "model siglip train, B=8, float32, vit_small_patch16_224, cpu"."""
        words = [f"{self.suite} {self.workload} {self.phase}"]
        if self.batch:
            words.append(f"B={self.batch}")
        words.append(self.dtype)
        for fact in ("model", "table"):
            words.append(self.about.get(fact, ""))
        for fact in ("grids", "tokens"):
            if fact in self.about:
                words.append(f"{self.about[fact]:,} {fact}")
        words.append(self.about.get("device", ""))
        return ", ".join(filter(None, words))

    def rows(self, times: dict[str, list[float]]) -> list[Row]:
        """A row for each contender's seconds, as result files hold it: the fields of the race, and

        - contender: its name.
        - rounds, median_ms.
        - low_ms, high_ms: the range in which the median of many more rounds would lie (95 %; with
          fewer than eight, all the rounds).
        - spread: half of that range, as a share of the median; None for fewer than three rounds.
        - times_faster: the baseline's median over this one's, in the same run; None without a
          baseline.
        """
        facts = dict(vars(self))
        del facts["contenders"]
        baseline = None
        if BASELINE in times:
            baseline = statistics.median(times[BASELINE])
        rows = []
        for name, seconds in times.items():
            median = statistics.median(seconds)
            low, high = median_range(seconds)
            figures: Row = dict(contender=name, rounds=len(seconds), median_ms=1e3 * median)
            figures |= dict(low_ms=1e3 * low, high_ms=1e3 * high, spread=None, times_faster=None)
            if len(seconds) >= LEAST_ROUNDS:
                figures["spread"] = (high - low) / 2 / median
            if baseline is not None:
                figures["times_faster"] = baseline / median
            rows.append(facts | figures)
        return rows


def median_range(seconds: Sequence[float]) -> tuple[float, float]:
    """The range of the median of many more rounds (95 %), by the normal approximation."""
    ordered = sorted(seconds)
    rounds = len(ordered)
    # Rounds that it leaves at each end.
    outside = max(0, int(rounds / 2 - 0.98 * math.sqrt(rounds)))
    return ordered[outside], ordered[-1 - outside]


def run(
    race: Race,
    rounds: int,
    *,
    budget: float = math.inf,
    advance: Advance = lambda share: None,
) -> list[Row]:
    """Time each contender ``rounds`` times, in turns, after warm-up rounds that do not count.

    Args:
        race: the contenders and what they do.
        rounds: at least 1.
        budget: seconds; a contender that would need more (as its fastest call so far shows) runs in
            fewer rounds, at least ``LEAST_ROUNDS``, spread evenly, so that a slow spell of the
            machine falls on all alike.
        advance: called with the share of the race that was done since its last call, 1 in all.

    Returns:
        A row for each contender: see :meth:`Race.rows`.
    """
    # glibc keeps freed blocks for the next caller only up to the size of the largest block that was
    # freed so far, 32 MiB at most; larger ones go back to Linux, which clears each new one page by
    # page. A process in which a model has run has freed such a block, so free one here too: all
    # contenders find the same allocator.
    torch.empty(NEAREST_32_MIB, dtype=torch.uint8)
    warmups = WARMUPS[race.about.get("device", "cpu")]
    times: dict[str, list[float]] = {contender.name: [] for contender in race.contenders}
    fastest = dict.fromkeys(times, math.inf)
    order = list(race.contenders)
    shuffle = random.Random(0).shuffle
    for turn in range(-warmups, rounds):
        # In a fixed order each would find the caches as the same predecessor left them.
        shuffle(order)
        for contender in order:
            name = contender.name
            affordable = max(LEAST_ROUNDS, budget / max(fastest[name], 1e-9))
            if turn < 0 or _takes_part(turn, int(min(rounds, affordable)), rounds):
                taken = _time(contender)
                fastest[name] = min(fastest[name], taken)
                if turn >= 0:
                    times[name].append(taken)
            advance(1 / len(order) / (rounds + warmups))
    return race.rows(times)


def _takes_part(turn: int, some: int, rounds: int) -> bool:
    """Whether this turn is one of ``some``, spread evenly over all ``rounds``.

    >>> [turn for turn in range(10) if _takes_part(turn, 3, 10)]
    [3, 6, 9]
    """
    return (turn + 1) * some // rounds > turn * some // rounds


def _time(contender: Timed) -> float:
    argument = contender.prepare()
    start = now()
    contender.run(argument)
    return now() - start


def now() -> float:
    """Seconds; on a machine with a GPU, after it has done the work given to it so far."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def times_faster(stock: Row, figures: Row) -> str:
    """How many times faster than timm, between which limits; or that it cannot be told."""
    if stock["spread"] is None or figures["spread"] is None:
        return "cannot be told (too few rounds)"
    low = stock["low_ms"] / figures["high_ms"]
    high = stock["high_ms"] / figures["low_ms"]
    told = number(stock["median_ms"] / figures["median_ms"])
    if low <= 1 <= high:
        told = "cannot be told"
    if figures["suite"] == "model" and max(stock["spread"], figures["spread"]) > PRECISE:
        told = "cannot be told"
    return f"{told} ({number(low)} to {number(high)})"


def print_race(title: str, rows: Sequence[Row]) -> None:
    """Print the rows of one race under their headings."""
    stock = next((row for row in rows if row["contender"] == BASELINE), None)
    print(title)
    print(table([_cells(row, stock) for row in rows]))
    print(flush=True)


def _cells(row: Row, stock: Row | None) -> dict[str, str]:
    """The text of each figure that a row has, under its heading."""
    name = row["contender"]
    about = row["about"]
    cells = {
        "mode": name,
        "median ms": number(row["median_ms"]),
        "rounds": str(row["rounds"]),
    }
    if row["spread"] is not None:
        cells["spread"] = f"{100 * row['spread']:.1f} %"
    if stock is not None and row is not stock:
        cells[f"times faster than {BASELINE}"] = times_faster(stock, row)
    if name in about.get("embeds_share", {}):
        cells["share of embeddings"] = f"{100 * about['embeds_share'][name]:.1f} %"
    for heading, count in about.get("counted", {}).get(name, {}).items():
        cells[heading] = number(count) if isinstance(count, float) else f"{count:,}"
    return cells
