"""What the user chose, and for whom: a model, else every model. Nothing here imports a library.

- component: one of the three things that are replaced: "pos_embed", "patch_embed", "rope";
- mode: what the user chose for a component, a name in ``VALID_MODES``; "stock" is the library's own
  code;
- strategy: what then computes one method, by name: the mode, another one, or "stock";
- settings: one mode for each component;
- choice: the settings of one ``enable()``. A module, or a library for every model, has its choices
  in one attribute, a tuple, oldest first: the newest that has not ended holds.

Tests: tests/patching/test_install.py.
"""

import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import SimpleNamespace
from typing import Any, Literal
from weakref import WeakSet, WeakValueDictionary

from ..names import MODES, StrategyName, check_name
from .calls import CHOICES_ATTRIBUTE, Counts, Settings

Mode = StrategyName | Literal["stock", "interpolate-cached", "grid-sample", "matmul-resample"]
VALID_MODES = {"pos_embed": MODES, "patch_embed": ("stock", "matmul"), "rope": ("stock", "batched")}
EXACT = {"patch_embed": "matmul", "rope": "batched"}  # with every mode but "stock"

lock = threading.RLock()
"""Held by whoever begins or ends choices."""
if hasattr(os, "register_at_fork"):  # not on Windows, which forks no process
    # A child has the lock as it is, and none of the other threads, which would let it go.
    os.register_at_fork(
        before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release
    )


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


@dataclass(eq=False)
class Choice:
    """What one ``enable()``, or one ``disable(model)``, has chosen.

    A copy of a model (an EMA) shares the choices of the model. In a pickle each is one that has
    ended, which a process without this package can read.
    """

    settings: Settings
    # Each a ``Library``, in which ours is put for it; none for the library's own code.
    libraries: tuple[Any, ...] = ()
    counts: Counts = field(default_factory=Counts)
    handle: Any = lambda: None  # a weak reference to what can end it
    places: WeakSet[Any] = field(default_factory=WeakSet)  # the modules, or libraries, that have it
    ended: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "Choice":
        return self

    def __reduce__(self) -> tuple[type, tuple[()], dict[str, bool]]:
        return SimpleNamespace, (), {"ended": True}


all_choices: WeakValueDictionary[int, Choice] = WeakValueDictionary()
"""Those that have not ended, by ``id``, oldest first, as long as a handle, a model, a copy of it or
a library has them."""


def holding() -> list[Choice]:
    """All choices that have not ended, oldest first."""
    return list(all_choices.values())


def libraries_in_use() -> set[Any]:
    """The libraries in which ours is put for a choice that holds."""
    return set(chain.from_iterable(choice.libraries for choice in holding()))


def put(choice: Choice, places: Mapping[Any, Iterable[Any]]) -> None:
    """Let a choice hold from now on: for these modules of each library, or for every model of it,
    where its place is the library itself."""
    choice.places.update(chain(*places.values()))
    all_choices[id(choice)] = choice
    for place in list(choice.places):
        vars(place)[CHOICES_ATTRIBUTE] = (*_left(place), choice)


def end(choice: Choice) -> None:
    """Let the newest of what is left hold. A place without choices is left as it was."""
    choice.ended = True
    all_choices.pop(id(choice), None)
    for place in list(choice.places):
        left = _left(place)
        if left:
            vars(place)[CHOICES_ATTRIBUTE] = left
        else:
            vars(place).pop(CHOICES_ATTRIBUTE, None)


def _left(place: Any) -> tuple[Choice, ...]:
    """The choices of a place that can still hold, oldest first.

    Only ``disable()``, which ends all, can end one whose handle is gone: those older than it can
    never hold again.
    """
    left: list[Choice] = []
    for choice in vars(place).get(CHOICES_ATTRIBUTE, ()):
        if not choice.ended:
            if choice.handle() is None:
                left.clear()
            left.append(choice)
    return tuple(left)
