"""A race as the rows of a result file."""

from collections.abc import Callable, Mapping
from typing import Any

from timm_naflex_fast.commands.measure.racing import Ready, race

Row = dict[str, Any]


ROUNDS = 30  # of a race


def time_race(facts: Row, sides: Mapping[str, Ready], rounds: int = ROUNDS) -> list[Row]:
    """A row for each side: ``facts`` and its figures.

    Args:
        facts: what the race is: "workload", "phase", "batch", and "about", further ones.
        sides: as ``race`` takes them.
        rounds: of the race.
    """
    found = race(sides, rounds)
    return [{**facts, "contender": name, **figures} for name, figures in found.items()]


def always(work: Callable[[], Any]) -> Ready:
    """A side that needs no readying."""
    return lambda: work
