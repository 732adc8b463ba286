"""A race as the rows of a result file."""

from collections.abc import Callable, Mapping
from typing import Any

from timm_naflex_fast.commands.measure.racing import Ready, race

Row = dict[str, Any]


def time_race(
    facts: Row, sides: Mapping[str, Ready], budget: float, tiny: bool, rounds: int = 30
) -> list[Row]:
    """A row for each side: ``facts`` and its figures.

    Args:
        facts: what the race is: "workload", "phase", "batch", "dtype", and "about", further ones.
        sides: as ``race`` takes them.
        budget: seconds of the race.
        tiny: two rounds alone, to see that it runs.
        rounds: at most.
    """
    if tiny:
        rounds = 2
    found = race(sides, rounds, budget)
    return [{**facts, "contender": name, **figures} for name, figures in found.items()]


def always(work: Callable[[], Any]) -> Ready:
    """A side that needs no readying."""
    return lambda: work
