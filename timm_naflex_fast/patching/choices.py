"""What the user chose, and for whom: a model, else every model. Nothing here imports a library.

- component: one of the three things that are replaced: "pos_embed", "patch_embed", "rope";
- mode: what the user chose for a component, a name in ``VALID_MODES``; "stock" is the library's own
  code;
- strategy: what then computes one method, by name: the mode, another one, or "stock";
- settings: one mode for each component;
- choice: the settings of one ``enable()``, and for what they were chosen.

Tests: tests/patching/test_install.py.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakSet

from ..names import STRATEGY_NAMES, StrategyName, did_you_mean

Mode = StrategyName | Literal["stock", "interpolate-cached", "grid-sample", "matmul-resample"]
MODES = ("stock", *STRATEGY_NAMES)
VALID_MODES = {"pos_embed": MODES, "patch_embed": ("stock", "matmul"), "rope": ("stock", "batched")}
EXACT = {"patch_embed": "matmul", "rope": "batched"}  # with every mode but "stock"
ALIASES = {"matmul_resample": "matmul"}
CHOICES_ATTRIBUTE = "_naflex_fast_own"

lock = threading.RLock()
"""Held by whoever adds, ends or copies choices."""
if hasattr(os, "register_at_fork"):  # not on Windows, which forks no process
    # A child has the lock as it is, and none of the other threads, which would let it go.
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )


@dataclass(frozen=True)
class Settings:
    """What computes each component; ``"stock"`` is the library's own code."""

    pos_embed: str = "stock"
    patch_embed: str = "stock"
    rope: str = "stock"
    # Raise where the library's own code had to run.
    strict: bool = field(default=False, repr=False, compare=False)


STOCK = Settings()


def check_name(argument: str, value: object, valid: Sequence[str]) -> str:
    """The name that ``value`` spells; ValueError with the valid ones if there is none."""
    if isinstance(value, str):
        name = value.replace("-", "_")
        name = ALIASES.get(name, name)
        if name in valid:
            return name
    near = did_you_mean(str(value), valid)
    names = ", ".join(map(repr, valid))
    raise ValueError(f"{value!r} is not valid for {argument}; valid: {names}{near}")


def parse_settings(mode: str, *, strict: bool, **overrides: str | None) -> Settings:
    """Settings for ``mode``; an argument that is given overrides its component.

    ``mode`` is the strategy of the position embeddings, with the exact fast one of everything else;
    ``mode="stock"`` is the library's own code throughout.

    Raises:
        ValueError: an unknown name, with the valid ones.
    """
    mode = check_name("mode", mode, MODES)
    modes = {"pos_embed": mode}
    if mode != "stock":
        modes |= EXACT
    for component, name in overrides.items():
        if name is not None:
            modes[component] = check_name(component, name, VALID_MODES[component])
    return Settings(**modes, strict=strict)


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
class Choice:
    """What one ``enable()``, or one ``disable(model)``, has chosen."""

    settings: Settings
    model_class: str  # the name of the class of the model that it is for; "": every model
    libraries: tuple[Any, ...] = ()  # each a ``Library``: where ours is put for it
    counts: Counts = field(default_factory=Counts)
    handle: Any = lambda: None  # a weak reference to what can end it
    ended: bool = False


class Choices:
    """The choices for one module, or for every model. The newest that has not ended holds.

    Those for a module are an attribute of it, so a ``deepcopy`` of a model (an EMA) starts with the
    same choices. In a pickle the attribute is None, which a process without this package can read.
    """

    def __init__(self, choices: Iterable[Choice] = ()) -> None:
        # Those that hold; None: no choice is left. Replaced in one step, for threads and compilers.
        self.settings: Settings | None = None
        # A model may be copied while another thread goes through all choices.
        with lock:
            self.choices = list(choices)  # oldest first
            self.update()
            every_choices.add(self)

    def add(self, choice: Choice) -> None:
        """Let a choice hold from now on."""
        self.choices.append(choice)
        self.update()

    def update(self) -> None:
        """Forget the choices that have ended, and those that can never hold again.

        Only ``disable()``, which ends all, can end one whose handle is gone: those older than it
        can never hold again.
        """
        left = []
        for choice in reversed(self.choices):
            if choice.ended:
                continue
            left.append(choice)
            if choice.handle() is None:  # only ``disable()`` can end it
                break
        self.settings = left[0].settings if left else None
        self.choices = left[::-1]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Choices":
        return Choices(self.choices)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


every_choices: WeakSet[Choices] = WeakSet()
"""Of every module, copies too, as long as it lives; and of every library."""
