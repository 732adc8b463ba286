"""The names that options, errors and pages use.

Nothing here needs torch: ``--help`` answers without it.
"""

from typing import Literal, get_args

StrategyName = Literal["interpolate_cached", "grid_sample", "matmul"]
STRATEGY_NAMES: tuple[str, ...] = get_args(StrategyName)
"""Each is an object in ``strategies.py``."""
