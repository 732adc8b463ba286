"""The names that options, errors and pages use.

Nothing here needs torch: ``--help`` answers without it.

Tests: tests/commands/cli/test_errors_first.py.
"""

from collections.abc import Collection
from typing import Literal, get_args

StrategyName = Literal["matmul", "interpolate_cached", "grid_sample"]
STRATEGY_NAMES: tuple[str, ...] = get_args(StrategyName)
"""Each is an object in ``strategies.py``."""


def check_valid(argument: str, value: object, valid: Collection[str]) -> None:
    """ValueError with the valid names if ``value`` is none of them."""
    if value not in valid:
        names = ", ".join(map(repr, valid))
        raise ValueError(f"{value!r} is not valid for {argument}; valid: {names}")
