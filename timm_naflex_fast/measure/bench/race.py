"""Contenders that do the same work, timed in turns: each round runs each of them once, so that
noise falls on all.

And the table of what came out.
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
from ..contenders import BASELINE, PLAIN_ADD
from ..output import number

WARMUPS = {"cpu": 1, "cuda": 3}
LEAST_ROUNDS = 3  # so that the median can ignore one round that something else disturbed
PRECISE = 0.02  # a whole model's step changes so little that medians have to be known so well
HOW_TO_READ = (
    "In brackets: the range in which the ratio lies, as the rounds differ (95 %). Where the range holds 1, or a whole "
    f"model's\nmedian is not known within {100 * PRECISE:.0f} %, these rounds cannot tell which is faster: run more of "
    "them, on a quieter machine."
)


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
        suite: "pos_embed", "model", "compiled", "exported", "patch_embed" or "rope".
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
        """The race in words, e.g. "pos_embed siglip train, B=64, float32, 16x16 bilinear, 51 grids,
        15,000 tokens"."""
        words = [
            f"{self.suite} {self.workload} {self.phase}",
            f"B={self.batch}" if self.batch else "",
            self.dtype,
        ]
        words += [self.about.get("model", ""), self.about.get("table", "")]
        words += [f"{self.about[key]:,} {key}" for key in ("grids", "tokens") if key in self.about]
        return ", ".join(filter(None, [*words, self.about.get("device")]))

    def rows(self, times: dict[str, list[float]]) -> list[dict[str, Any]]:
        """A row for each contender's seconds, as result files hold it: the fields of the race, and

        - rounds, median_ms; low_ms, high_ms: the range in which the median of many more rounds
          would lie (95 %; with fewer than eight, all the rounds).
        - spread: half of that range, as a share of the median; None for fewer than three rounds.
        - times_faster: the baseline's median over this one's, in the same run; None without a
          baseline.
        - times_plain_add: this median over that of one plain add; None where that did not run.
        """
        work = {key: value for key, value in vars(self).items() if key != "contenders"}
        medians = {name: statistics.median(found) for name, found in times.items()}
        baseline, plain = medians.get(BASELINE), medians.get(PLAIN_ADD)
        rows = []
        for name, median in medians.items():
            ordered, rounds = sorted(times[name]), len(times[name])
            left_out = max(
                0, int(rounds / 2 - 0.98 * math.sqrt(rounds))
            )  # at each end, by the normal approximation
            low, high = ordered[left_out], ordered[-1 - left_out]
            figures = dict(
                contender=name,
                rounds=rounds,
                median_ms=1e3 * median,
                low_ms=1e3 * low,
                high_ms=1e3 * high,
            )
            figures["spread"] = (high - low) / 2 / median if rounds >= LEAST_ROUNDS else None
            figures |= dict(
                times_faster=baseline and baseline / median,
                times_plain_add=plain and median / plain,
            )
            rows.append(work | figures)
        return rows


def run(
    race: Race,
    rounds: int,
    *,
    budget: float = math.inf,
    advance: Callable[[float], Any] = lambda share: None,
) -> list[dict[str, Any]]:
    """Time each contender ``rounds`` times, in turns, after warm-up rounds that do not count; see
    :meth:`Race.rows`.

    Args:
        race: the contenders and what they do.
        rounds: at least 1.
        budget: seconds; a contender that would need more (as its fastest call so far shows) runs in
            fewer rounds, at least ``LEAST_ROUNDS``, spread evenly, so that a slow spell of the
            machine falls on all alike.
        advance: called with the share of the race that was done since its last call, 1 in all.
    """
    device = race.about.get("device", "cpu")
    # Free a block of almost 32 MiB, as any process has done in which a model has run. From then on
    # glibc keeps blocks of up to that size when they are freed, for every contender; before, it
    # hands those above 128 KiB back to Linux, which clears each new one page by page.
    torch.empty(31 * 2**20, dtype=torch.uint8)
    times = {contender.name: list[float]() for contender in race.contenders}
    fastest = dict.fromkeys(times, math.inf)
    order, shuffle, warmups = list(race.contenders), random.Random(0).shuffle, WARMUPS[device]
    for turn in range(-warmups, rounds):
        shuffle(
            order
        )  # otherwise each would always find the caches as the same predecessor left them
        for contender in order:
            name = contender.name
            share = int(min(rounds, max(LEAST_ROUNDS, budget / max(fastest[name], 1e-9))))
            if (
                turn < 0 or (turn + 1) * share // rounds > turn * share // rounds
            ):  # spread evenly over the rounds
                argument, start = contender.prepare(), now()
                contender.run(argument)
                taken = now() - start
                fastest[name] = min(fastest[name], taken)
                if turn >= 0:
                    times[name].append(taken)
            advance(1 / len(order) / (rounds + warmups))
    return race.rows(times)


def now() -> float:
    """Seconds; on a machine with a GPU, after it has done the work given to it so far."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def times_faster(stock: dict[str, Any], figures: dict[str, Any]) -> str:
    """How many times faster than timm a contender is, and between which limits; or that it cannot
    be told."""
    if stock["spread"] is None or figures["spread"] is None:
        return "cannot be told (too few rounds)"
    low, high = stock["low_ms"] / figures["high_ms"], stock["high_ms"] / figures["low_ms"]
    rough = figures["suite"] == "model" and max(stock["spread"], figures["spread"]) > PRECISE
    told = (
        number(stock["median_ms"] / figures["median_ms"])
        if not (low <= 1 <= high or rough)
        else "cannot be told"
    )
    return f"{told} ({number(low)} to {number(high)})"


def print_race(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the rows of one race, without columns that have no figure."""
    stock = next((row for row in rows if row["contender"] == BASELINE), None)
    lines = []
    for row in rows:
        name, about = row["contender"], row["about"]
        share = about.get("embeds_share", {}).get(name)
        line = {
            "contender": name,
            "median ms": number(row["median_ms"]),
            "rounds": str(row["rounds"]),
            "spread": row["spread"] is not None and f"{100 * row['spread']:.1f} %",
            f"times faster than {BASELINE}": stock
            and name != BASELINE
            and times_faster(stock, row),
            "times one plain add": row["times_plain_add"] and number(row["times_plain_add"]),
            "share of embeddings": share and f"{100 * share:.1f} %",
        }
        for heading, n in about.get("counted", {}).get(name, {}).items():
            line[heading] = number(n) if isinstance(n, float) else f"{n:,}"
        lines.append({heading: text for heading, text in line.items() if text})
    print(title)
    print(table(lines))
    print(flush=True)
