"""The names that options, errors and pages use.

Nothing here needs torch: ``--help`` answers without it.

Tests: tests/commands/cli/test_errors_first.py.
"""

import difflib
from collections.abc import Collection
from typing import Literal, get_args

StrategyName = Literal["matmul", "interpolate_cached", "grid_sample"]
STRATEGY_NAMES: tuple[str, ...] = get_args(StrategyName)
"""Each is a function in ``pos_embed/strategies.py``."""
BASELINE = "stock"  # the library's own code
MODES = (BASELINE, *STRATEGY_NAMES)
ALIASES = {"matmul_resample": "matmul"}


def check_valid(argument: str, value: object, valid: Collection[str]) -> None:
    """ValueError with the valid names if ``value`` is none of them."""
    if value not in valid:
        names = ", ".join(map(repr, valid))
        meant = did_you_mean(str(value), valid)
        raise ValueError(f"{value!r} is not valid for {argument}; valid: {names}{meant}")


def check_name(argument: str, value: object, valid: Collection[str]) -> str:
    """The name that ``value`` spells; ValueError with the valid ones if there is none."""
    name = str(value).replace("-", "_")
    name = ALIASES.get(name, name)
    check_valid(argument, name, valid)
    return name


def did_you_mean(word: str, names: Collection[str]) -> str:
    """The end of a message about a word that is none of ``names``; empty where none is near."""
    near = difflib.get_close_matches(word, names, n=1)
    if not near:
        return ""
    return f"; did you mean {near[0]}?"
