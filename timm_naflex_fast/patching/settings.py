"""The settings, and whose hold: a model's own, else those for every model. Nothing here imports a library.

- component: one of the three things that are replaced: "pos_embed", "patch_embed", "rope";
- mode: what the user chose for a component, a name in ``VALID_MODES``; "stock" is the library's own code;
- impl: what then computes one method: the mode, another strategy, or "stock";
- strategy: an object that resamples position tables (``strategies/``); every mode of "pos_embed" but "stock" names one;
- settings: one mode for each component.

A model's own settings are an attribute of its modules, so ``deepcopy`` and EMA copies have them too; ``state_dict`` and
pickles do not.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from ..names import STRATEGY_NAMES, StrategyName

Mode = StrategyName | Literal["stock", "interpolate-cached", "grid-sample", "matmul-resample"]
MODES = ("stock", *STRATEGY_NAMES)
VALID_MODES = {"pos_embed": MODES, "patch_embed": ("stock", "matmul"), "rope": ("stock", "batched")}
# The last of "patch_embed" and of "rope" is what every mode but "stock" takes.
ALIASES = {"matmul_resample": "matmul"}
MODE_VARIABLE = "TIMM_NAFLEX_FAST_MODE"
ATTRIBUTE = "_naflex_fast_enabled"


@dataclass(frozen=True)
class Settings:
    """What computes each component; ``"stock"`` is the library's own code."""

    pos_embed: str = "stock"
    patch_embed: str = "stock"
    rope: str = "stock"

    @property
    def is_stock(self) -> bool:
        """Whether the library's own code computes every component."""
        return self == STOCK


STOCK = Settings()


def check_name(argument: str, value: object, valid: Sequence[str]) -> str:
    """The name that ``value`` spells; ValueError with the valid ones if there is none."""
    if isinstance(value, str):
        name = value.replace("-", "_")
        name = ALIASES.get(name, name)
        if name in valid:
            return name
    raise ValueError(f"{value!r} is not valid for {argument}; valid: {', '.join(map(repr, valid))}")


def parse_settings(mode: str = "matmul", **overrides: str | None) -> Settings:
    """Settings for ``mode``; an argument that is given overrides its component.

    ``mode`` is the strategy of the position embeddings, with the exact fast impl of everything else;
    ``mode="stock"`` is the library's own code throughout.

    Raises:
        ValueError: an unknown name, with the valid ones.
    """
    mode = check_name("mode", mode, MODES)
    modes = {name: "stock" if mode == "stock" else valid[-1] for name, valid in VALID_MODES.items()}
    modes["pos_embed"] = mode
    for component, name in overrides.items():
        if name is not None:
            modes[component] = check_name(component, name, VALID_MODES[component])
    return Settings(**modes)


def default_mode() -> Mode:
    """The mode of a command that was given none: the environment's ``TIMM_NAFLEX_FAST_MODE``, else "matmul".

    Raises:
        ValueError: the variable holds an unknown name; with the valid ones.
    """
    return cast(Mode, check_name(MODE_VARIABLE, os.environ.get(MODE_VARIABLE) or "matmul", MODES))


@dataclass
class Counts:
    """What ran since an ``enable()``.

    ``calls``: how often each (component, impl) ran: ("pos_embed", "matmul"), ("pos_embed", "stock"), ... ``fallbacks``:
    how often a library's own code ran although something else was chosen, by reason.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class Enabled:
    """One ``enable()`` and its settings, as long as they may hold.

    Every library or module that it is for refers to it, in a tuple: the newest first. The copies of a model share it,
    so it ends for all of them by one assignment.
    """

    settings: Settings | None = None  # None: not in force yet, or no more
    model: str = ""  # the class of the model that it is for; "": every model
    libraries: tuple[str, ...] = ()
    handle: Callable[[], object] = lambda: None  # a weak reference; None once nobody can end these settings alone
    counts: Counts = field(default_factory=Counts)

    def __deepcopy__(self, memo: dict[int, Any]) -> Enabled:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # a process without this package can read it


def own_settings(holder: object) -> Settings | None:
    """A module's own settings (or a library's), None if it has none, or is None. May be traced."""
    # By ``getattr``: the compiler then checks before each call that there still is none; in ``__dict__`` it does not.
    for enabled in getattr(holder, ATTRIBUTE, ()):
        if enabled is not None and enabled.settings is not None:  # None came out of a pickle
            return enabled.settings
    return None


def may_hold(newest_first: Sequence[Enabled | None]) -> tuple[Enabled, ...]:
    """Those that hold or may hold again: all in force, down to the first that no handle can end."""
    found: list[Enabled] = []
    for enabled in newest_first:
        if enabled is not None and enabled.settings is not None:
            found.append(enabled)
            if enabled.handle() is None:
                break
    return tuple(found)
