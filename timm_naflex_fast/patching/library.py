"""A library whose methods we replace, and who wrote a method that is in one of its classes.

Nothing here changes anything. Tests: tests/patching/test_install.py.
"""

import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from ..pos_embed.strategies import EXACT

Key = tuple[str, str]
"""("module:Class", method)."""


@dataclass(eq=False)
class Library:
    """A library whose methods we replace."""

    name: str
    oldest: str
    newest: str  # of the releases that we know
    modes: tuple[str, ...]  # of the position embeddings
    # By class and method: the attributes that the newest known release names in what we replace or
    # have copied.
    reads: Mapping[str, Mapping[str, str]]
    # Classes that resize a position table for each grid by code of their own, as "module:Class".
    not_served: tuple[str, ...] = ()
    # For ``status()``: on releases before a version.
    notes: Mapping[str, str] = field(default_factory=dict)
    # Each is a ``Replacement``: see ``calls``.
    replacements: dict[Key, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known_libraries.add(self)

    def places(self) -> list[tuple[type, str, Any]]:
        """The class of each method that we replace, its name, and what replaces it; of what is
        loaded."""
        places = []
        for (path, name), replacement in self.replacements.items():
            owner = owner_of(path)
            if owner is not None:
                places.append((owner, name, replacement))
        return places

    def classes(self) -> tuple[type, ...]:
        """Those of them."""
        return tuple(owner for owner, _, _ in self.places())

    def wrote(self, function: Any) -> bool:
        """Whether a function is the library's own.

        A wrapper can copy the name of what it wraps, but not its globals.
        """
        # torch.compiler.disable, with which timm marks some, and its twin that imports nothing.
        if home_of(function).startswith(("torch._dynamo.", "torch._compile")):
            function = vars(function).get("__wrapped__")
        return home_of(function).partition(".")[0] == self.name


known_libraries: set[Library] = set()
"""Those that were enabled or looked at."""

EXACT_STRATEGIES = {name: name for name in EXACT}
"""By mode: the strategies with the result of ``F.interpolate``, for methods that call it."""


def owner_of(path: str) -> Any:
    """The class of a path "module:Class"; None if it is not loaded."""
    module, _, cls = path.partition(":")
    return getattr(sys.modules.get(module), cls, None)


def sentence_on_not_served(libraries: Iterable[Library], classes: Iterable[type]) -> list[str]:
    """A sentence on those of these classes that somebody may take for one that is replaced; no
    sentence where there is none.

    A library lists them. Or they bear the name of one that is replaced and are another: a copy, or
    code that came with a checkpoint.
    """
    served: tuple[type, ...] = ()
    names = set()
    for library in libraries:
        served += library.classes()
        replaced = [path for path, _ in library.replacements]
        for path in (*replaced, *library.not_served):
            names.add(path.partition(":")[2])
    found = []
    for cls in dict.fromkeys(classes):
        if cls.__name__ in names and not issubclass(cls, served):
            found.append(f"{cls.__module__}.{cls.__name__}")
    if not found:
        return []
    return [
        f"nothing is replaced in {', '.join(found)}: position tables are resized there by other "
        "code, under every mode"
    ]


def home_of(function: Any) -> str:
    """The file in which a function or method was defined; "" for what is none, a proxy too."""
    function = getattr(function, "__func__", function)
    if type(function) is not FunctionType:
        return ""
    return str(function.__globals__.get("__name__", ""))


def is_ours(function: Any) -> bool:
    """Whether it is one of the functions that take a method's place."""
    return home_of(function).startswith(f"{__package__}.")


def calls_ours(function: Any) -> bool:
    """Whether it is ours, or a wrapper of ours that says so (``functools``, wrapt, accelerate)."""
    return is_ours(inspect.unwrap(function, stop=is_ours))


def author_of(function: Any) -> str:
    """What another package put in a method's place, by its full name."""
    kind = type(function)
    name = getattr(function, "__qualname__", kind.__name__)
    return f"{home_of(function) or kind.__module__}.{name}"
