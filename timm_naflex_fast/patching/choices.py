"""What the user chose, and for whom: a model, else every model. Nothing here imports a library.

- component: one of the three things that are replaced: "pos_embed", "patch_embed", "rope";
- mode: what the user chose for a component, a name in ``VALID_MODES``; "stock" is the library's own
  code;
- strategy: what then computes one method, by name: the mode, another one, or "stock";
- settings: one mode for each component;
- override: the settings of one ``enable()``.
"""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from weakref import WeakSet

from ..names import STRATEGY_NAMES, StrategyName

Mode = StrategyName | Literal["stock", "interpolate-cached", "grid-sample", "matmul-resample"]
MODES = ("stock", *STRATEGY_NAMES)
VALID_MODES = {"pos_embed": MODES, "patch_embed": ("stock", "matmul"), "rope": ("stock", "batched")}
# The last of "patch_embed" and of "rope" is what every mode but "stock" takes.
ALIASES = {"matmul_resample": "matmul"}
MODE_VARIABLE = "TIMM_NAFLEX_FAST_MODE"
SETTINGS_ATTRIBUTE = "_naflex_fast_own"


@dataclass(frozen=True)
class Settings:
    """What computes each component; ``"stock"`` is the library's own code."""

    pos_embed: str = "stock"
    patch_embed: str = "stock"
    rope: str = "stock"
    strict: bool = field(
        default=False, repr=False, compare=False
    )  # raise where the library's own code had to run


STOCK = Settings()


def check_name(argument: str, value: object, valid: Sequence[str]) -> str:
    """The name that ``value`` spells; ValueError with the valid ones if there is none."""
    if isinstance(value, str):
        name = value.replace("-", "_")
        name = ALIASES.get(name, name)
        if name in valid:
            return name
    raise ValueError(f"{value!r} is not valid for {argument}; valid: {', '.join(map(repr, valid))}")


def parse_settings(mode: str, *, strict: bool, **overrides: str | None) -> Settings:
    """Settings for ``mode``; an argument that is given overrides its component.

    ``mode`` is the strategy of the position embeddings, with the exact fast one of everything else;
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
    return Settings(**modes, strict=strict)


def default_mode() -> Mode:
    """The mode of a command that was given none: the environment's ``TIMM_NAFLEX_FAST_MODE``, else
    "matmul".

    Raises:
        ValueError: the variable holds an unknown name; with the valid ones.
    """
    return cast(Mode, check_name(MODE_VARIABLE, os.environ.get(MODE_VARIABLE) or "matmul", MODES))


@dataclass
class Counts:
    """What ran since an ``enable()``.

    ``calls``: how often each (component, strategy) ran: ("pos_embed", "matmul"), ("pos_embed",
    "stock"), ... ``fallbacks``: how often a library's own code ran although something else was
    chosen, by reason.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class Override:
    """One ``enable()``, or one ``disable(model)``."""

    settings: Settings
    model: str  # the class of the model that it is for; "": every model
    libraries: tuple[Any, ...] = ()  # each a ``Library``: where ours is put for it
    counts: Counts = field(default_factory=Counts)


@dataclass(eq=False)
class ModelSettings:
    """The settings of one model and its copies, an attribute of their modules.

    ``deepcopy`` (and so EMA) copies share this object, so a change reaches all of them by one
    assignment. In a pickle it is None, which a process without this package can read.
    """

    overrides: tuple[Override, ...]  # of this model, oldest first; some may have ended
    settings: Settings | None  # of the newest that has not; None: those for every model hold
    modules: WeakSet[Any] = field(default_factory=WeakSet)  # without the copies'

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelSettings":
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()
