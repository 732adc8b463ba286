"""The strategies by name. Each is one object, ``STRATEGY``, of the module that has its name."""

from importlib import import_module

from ..names import STRATEGY_NAMES
from .base import Strategy

__all__ = ["STRATEGIES", "Strategy"]

STRATEGIES: dict[str, Strategy] = {
    name: import_module(f"{__name__}.{name}").STRATEGY for name in STRATEGY_NAMES
}
