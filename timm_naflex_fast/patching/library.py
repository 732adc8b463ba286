"""The ``Library`` that each library's file defines, and where its own functions are.

``original`` finds the library's own method, whether or not ours is in its place.

Tests: tests/patching/test_install.py.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any

from torch import Tensor

from ..resampling.spec import LOOP
from ..strategies import STRATEGIES
from ..tracing import Context
from .choices import Choices

Key = tuple[str, str]
"""("module:Class", method), or ("module:", function)."""


class Replacement:
    """What takes the place of one method or function; each kind of them is a class.

    As a decorator it says which function: that hands its arguments to ``decide.serve``.
    """

    component: str
    function: Callable[..., Any]
    # Whether a call of the library's own code is counted here; else by another that it calls.
    counts_own = True

    def __init__(
        self,
        library: "Library",
        key: Key,
        strategies: Mapping[str, str],
        skips: tuple[str, ...] = (),
        own: Mapping[str, Key] = MappingProxyType({}),
    ) -> None:
        """
        Args:
            library: of the method.
            key: its class and name.
            strategies: by the component's mode; the library's own code under every other mode.
            skips: the methods of the module, or of an attribute of it ("rope.get_embed"), that the
                library's code calls and ours does not: if another has changed one, ours may not
                run.
            own: by the component's mode: the library's own method that has its result, if it is
                another one.
        """
        self.library = library
        self.key = key
        self.strategies = strategies
        self.skips = skips
        self.own = own

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Let this function take the method's place, from ``enable()`` on."""
        self.function = function
        self.library.replacements[self.key] = self
        return function

    def why_not(self, *arguments: Any) -> str | None:
        """Why the library's own code has to run, in words, if that is known from the arguments.

        ``arguments`` are the method's, here and below: first the module.
        """
        return None

    def tensors(self, *arguments: Any) -> tuple[Tensor, ...]:
        """What ours computes with, tables too. A parametrized table is computed when it is read."""
        return ()

    def compute(
        self, strategy: str, context: Context, tensors: tuple[Tensor, ...], *arguments: Any
    ) -> Any:
        """The method's result; or in words why the library's own code has to run."""
        raise NotImplementedError


@dataclass(eq=False)
class Library:
    """A library whose methods we replace."""

    name: str
    oldest: tuple[int, ...]
    newest: tuple[int, ...]  # of the releases that we know
    modes: tuple[str, ...]  # of the position embeddings
    # By class and method: the attributes that the newest known release names in what we replace or
    # have copied.
    reads: Mapping[str, Mapping[str, str]]
    # For ``status()``: on releases before a version.
    notes: Mapping[tuple[int, ...], str] = field(default_factory=dict)
    # How the names of the files begin that are imported when a model is made; () where all are at
    # once, used or not.
    loaded_with_models: tuple[str, ...] = ()
    replacements: dict[Key, Replacement] = field(default_factory=dict)
    choices: Choices = field(default_factory=Choices)  # for every model that has none of its own

    @property
    def is_patched(self) -> bool:
        """Whether one of ours is in place."""
        return not in_place.isdisjoint(self.replacements)


EXACT_STRATEGIES: dict[str, str] = {}
for _name, _strategy in STRATEGIES.items():
    if _strategy.reference is LOOP:
        EXACT_STRATEGIES[_name] = _name
"""By mode: the strategies with the result of ``F.interpolate``, for methods that call it."""

originals: dict[Key, Callable[..., Any]] = {}
"""The libraries' own functions that ours took the place of. They stay here: another package may
have saved ours, and call it when it is gone."""

in_place: set[Key] = set()
"""Where ours is now, perhaps under what another package has put over it since."""


def original(key: Key) -> Callable[..., Any]:
    """The library's own method or function: ours calls it where ours may not compute."""
    function = originals.get(key)
    if function is None:
        path, name = key
        function = getattr(owner_of(path), name)
    return function


def owner_of(path: str) -> Any:
    """The class ("module:Class") or module ("module:"); None if it is not loaded."""
    module_name, _, cls = path.partition(":")
    module = sys.modules.get(module_name)
    if cls:
        return getattr(module, cls, None)
    return module


def owners(library: Library) -> dict[Key, Any]:
    """The class or module of Python that each method is in that we replace; of what is loaded."""
    loaded = {}
    for key in library.replacements:
        owner = owner_of(key[0])
        if owner is not None:
            loaded[key] = owner
    return loaded


def places(library: Library) -> list[tuple[Any, Key]]:
    """The same, and the modules of the library that imported one of these functions by name."""
    everywhere = []
    for key, owner in owners(library).items():
        everywhere.append((owner, key))
        if not isinstance(owner, ModuleType):
            continue
        # What ``from module import function`` gave: ours or the library's own, whichever was there.
        _, name = key
        known = library.replacements[key].function, originals.get(key), vars(owner).get(name)
        for path, module in list(sys.modules.items()):
            if path.startswith(f"{library.name}.") and module is not owner:
                function = getattr(module, name, None)
                if function is not None and function in known:
                    everywhere.append((module, key))
    return everywhere
