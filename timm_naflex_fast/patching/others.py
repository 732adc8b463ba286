"""What other packages changed of what we replace, or skip: patches, subclasses, hooks, wrappers.

Nothing here changes anything.
"""

import functools
import gc
from collections.abc import Collection, Iterable
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from .library import Key, Library, in_place, owners

# What a wrapper consists of, and what it may hold the wrapped function in.
WRAPPING = (FunctionType, MethodType, functools.partial, CellType, tuple, dict)


def author_of(function: Any, library: Library) -> str:
    """Who wrote a function: "ours", "original", or "foreign", which may wrap one of the others.

    A wrapper can copy the name of what it wraps, but not its ``__globals__``; a proxy has those
    too, and another type.
    """
    if type(function) in (MethodType, staticmethod):
        function = function.__func__
    for replacement in library.replacements.values():
        if function is replacement.function:
            return "ours"
    # torch.compiler.disable, and its twin that imports nothing.
    if defined_in(function).startswith(("torch._dynamo.", "torch._compile")):
        function = vars(function).get("__wrapped__")
    in_library = defined_in(function).partition(".")[0] == library.name
    return "original" if in_library else "foreign"


def defined_in(function: Any) -> str:
    """The module in which a function was defined; "" for what is no function, a proxy too."""
    if type(function) is not FunctionType:
        return ""
    return str(function.__globals__.get("__name__", ""))


def calls_ours(function: Any, library: Library) -> bool:
    """Whether it is ours, or wraps ours: a bound method, a partial, ``functools.wraps``, a closure.

    accelerate's hooks keep the bound ``forward`` of before. If that was ours, ours runs.
    """
    seen = set()
    waiting = [function]
    while waiting:
        part = waiting.pop()
        if author_of(part, library) == "ours":
            return True
        # What it refers to, but for its module: a function does not call all that is there.
        seen |= {id(part), id(getattr(part, "__globals__", None))}
        for inside in gc.get_referents(part):
            if type(inside) in WRAPPING and id(inside) not in seen:
                waiting.append(inside)
    return False


def classes_of(library: Library) -> list[Any]:
    """All loaded classes that have a method of the library's that we replace, the derived ones too;
    and modules of Python that have such a function."""
    classes: list[Any] = []
    for owner in owners(library).values():
        classes += with_derived(owner)
    return classes


def modules_in(library: Library, model: nn.Module) -> list[nn.Module]:
    """A model's modules that have methods of the library's that we replace."""
    classes = classes_of(library)
    modules = []
    for part in model.modules():
        if type(part) in classes:
            modules.append(part)
    return modules


def instances_of(classes: Collection[Any]) -> list[Any]:
    """All objects of these classes that this process holds.

    Python's garbage collector finds them, in 0.04 s where there are half a million objects: an
    object refers to its class.
    """
    instances = []
    for each in gc.get_referrers(*classes):
        if type(each) in classes:
            instances.append(each)
    return instances


def with_derived(owner: Any) -> list[Any]:
    """A class and all that are derived from it, or a module of Python."""
    classes = [owner]
    if isinstance(owner, type):
        for derived in list[type](owner.__subclasses__()):
            classes += with_derived(derived)
    return classes


def in_force(library: Library, users: Iterable[Any]) -> tuple[set[Key], list[str]]:
    """Which of ours are in force; and what stays in force where one should be, in sentences.

    Args:
        library: whose methods ours take the place of.
        users: classes, modules of Python and modules of models that have these methods. For one
            of them at least ours is called.

    Not named is what another has put over ours, and a subclass's method that calls the one it
    hides: that may call ours.
    """
    ours: set[Key] = set()
    stays: dict[str, bool] = {}  # in order
    homes = owners(library)
    for user in users:
        line = line_of(user)
        for key, home in homes.items():
            if home not in line:
                continue
            owner, function = look_up(user, key[1])
            author = author_of(function, library)
            is_called = author != "original"
            is_hidden = author == "foreign" and key not in in_place
            if owner is not home:
                # A method of a subclass that names the one it hides calls it, as by super().
                code = getattr(function, "__code__", None)
                names = getattr(code, "co_names", ())
                is_called = key[1] in names or calls_ours(function, library)
                is_hidden = not is_called
            if is_hidden:
                stays[_sentence(key[1], owner, function)] = True
            elif is_called and key in in_place:
                ours.add(key)
    return ours, list(stays)


def line_of(user: Any) -> tuple[Any, ...]:
    """Where Python looks for what a module, class or module of Python has."""
    return (user, *getattr(user, "__mro__", type(user).__mro__))


def look_up(user: Any, name: str) -> tuple[Any, Any]:
    """The first in line that has this method, and the method."""
    for owner in line_of(user):
        if name in vars(owner):
            return owner, vars(owner)[name]
    return user, None


def _sentence(name: str, owner: Any, function: Any) -> str:
    where = getattr(owner, "__name__", None) or f"one {type(owner).__name__}"
    kind = type(function)
    home = defined_in(function) or kind.__module__
    by = getattr(function, "__qualname__", kind.__name__)
    return f"{where}.{name} is {home}.{by}"


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
    return bound_elsewhere or author_of(function, library) == "foreign"


def _is_hooked(module: Any) -> bool:
    for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        if getattr(module, kind, None) or getattr(nn.modules.module, f"_global{kind}"):
            return True
    return False
