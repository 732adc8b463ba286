"""The ``Library`` that each library's file defines, and where its own functions are.

``original`` finds the library's own method, whether or not ours is in its place.

Nothing here changes anything. Tests: tests/patching/test_install.py.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ..resampling.spec import LOOP
from ..strategies import STRATEGIES
from ..tracing import Context

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
    replacements: dict[Key, Replacement] = field(default_factory=dict)
    # Where ours is, perhaps under what another package has put over it since.
    in_place: set[Key] = field(default_factory=set)

    def owners(self) -> dict[Key, Any]:
        """The class or module of Python that each method is in that we replace; of what is loaded."""
        loaded = {}
        for key in self.replacements:
            owner = owner_of(key[0])
            if owner is not None:
                loaded[key] = owner
        return loaded

    def wrote(self, function: Any) -> bool:
        """Whether a function is the library's own.

        A wrapper can copy the name of what it wraps, but not its globals.
        """
        # torch.compiler.disable, with which timm marks some, and its twin that imports nothing.
        if home_of(function).startswith(("torch._dynamo.", "torch._compile")):
            function = vars(function).get("__wrapped__")
        return home_of(function).partition(".")[0] == self.name


EXACT_STRATEGIES: dict[str, str] = {}
for _name, _strategy in STRATEGIES.items():
    if _strategy.reference is LOOP:
        EXACT_STRATEGIES[_name] = _name
"""By mode: the strategies with the result of ``F.interpolate``, for methods that call it."""

originals: dict[Key, Callable[..., Any]] = {}
"""The libraries' own functions that ours took the place of. They stay here: another package may
have saved ours, and call it when it is gone."""


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


def home_of(function: Any) -> str:
    """The file in which a function or method was defined; "" for what is none, a proxy too."""
    function = getattr(function, "__func__", function)
    if type(function) is not FunctionType:
        return ""
    return str(function.__globals__.get("__name__", ""))


def is_ours(function: Any) -> bool:
    """Whether it is one of the functions that take a method's place."""
    return home_of(function).startswith(f"{__package__}.")


def runs_ours(function: Any) -> bool:
    """Whether it is ours, or says that it wraps ours: by ``functools``, wrapt, accelerate's hooks."""
    while function is not None and not is_ours(function):
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is None and isinstance(function, functools.partial):
            wrapped = function.func
        function = wrapped
    return function is not None


def look_up(user: Any, name: str) -> tuple[Any, Any]:
    """Where Python finds a method of a module, class or module of Python, and the method."""
    for owner in (user, *getattr(user, "__mro__", type(user).__mro__)):
        if name in vars(owner):
            return owner, vars(owner)[name]
    return user, None


def named(owner: Any, name: str, function: Any) -> str:
    """A method that another package put there, in words."""
    where = getattr(owner, "__name__", None) or f"one {type(owner).__name__}"
    kind = type(function)
    by = getattr(function, "__qualname__", kind.__name__)
    return f"{where}.{name} is {home_of(function) or kind.__module__}.{by}"


def hiding(user: Any, name: str, home: Any) -> str | None:
    """What hides ours in a module or class that has the method of ``home``, in words.

    None: nothing, as far as that shows. What wraps ours calls it, and a subclass's method that
    names the one that it hides, as by super().
    """
    owner, function = look_up(user, name)
    if owner is home or runs_ours(function):
        return None
    code = getattr(function, "__code__", None)
    if isinstance(owner, type) and name in getattr(code, "co_names", ()):
        return None
    return named(owner, name, function)


def hidden(library: Library, users: Iterable[Any]) -> list[str]:
    """The methods of these modules or classes that hide ours, in sentences."""
    sentences: dict[str, bool] = {}  # in order
    for user in users:
        for (_, name), home in library.owners().items():
            sentence = hiding(user, name, home) if has(user, home) else None
            if sentence is not None:
                sentences[sentence] = True
    return list(sentences)


def has(user: Any, home: Any) -> bool:
    """Whether a module or class is of a class ``home``, or derived from it; or is that file."""
    cls = user if isinstance(user, type) else type(user)
    return user is home or (isinstance(home, type) and issubclass(cls, home))


def overridden_by(library: Library, module: Any, skips: tuple[str, ...]) -> str | None:
    """What another has changed of what the library's code calls and ours does not, in words.

    None: nothing. So a subclass, a patch and a hook keep their effect, except in a graph of
    ``torch.compile``, which cannot ask.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    for path in skips:
        # "rope.get_embed" is a method of the module's ``rope``, "get_embed" one of its own.
        attribute, _, name = path.rpartition(".")
        holder = getattr(module, attribute, None) if attribute else module
        if holder is not None and _is_changed(library, holder, name):
            return f"{type(holder).__name__}.{name} (not the library's own)"
    return None


def _is_changed(library: Library, holder: Any, name: str) -> bool:
    """Whether to call this function of the holder does something else than in the library."""
    # ``forward`` is called by calling the module, whatever ``forward`` it has.
    if name == "forward" and _is_hooked(holder):
        return True
    _, function = look_up(holder, name)
    if function is None:
        return False
    # A method that was taken from another module has that one's settings.
    bound_elsewhere = getattr(function, "__self__", holder) is not holder
    return bound_elsewhere or not (library.wrote(function) or is_ours(function))


def _is_hooked(module: Any) -> bool:
    for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        if getattr(module, kind, None) or getattr(nn.modules.module, f"_global{kind}"):
            return True
    return False
