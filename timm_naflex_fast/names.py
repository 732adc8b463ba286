"""The names that options, errors and pages use.

Nothing here needs torch: ``--help`` answers without it.

Tests: tests/commands/cli/test_errors_first.py.
"""

from typing import Literal, get_args

StrategyName = Literal["matmul", "interpolate_cached", "grid_sample"]
STRATEGY_NAMES: tuple[str, ...] = get_args(StrategyName)
"""Each is an object in ``strategies.py``."""
