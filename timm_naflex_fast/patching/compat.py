"""Whether an installed library is one that we know: its version, its own methods, their arguments, what they read.

A method that reads another attribute of its module than it used to has gained or lost a setting, and a method that
nobody calls any more has been superseded. Replacing either would change results without a word, so it is refused.
Nothing is imported here: ``install`` holds its lock.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from enum import Enum
from functools import lru_cache
from typing import Any

from ..tracing import recorded
from .library import Library, Place


class Slot(Enum):
    """Whose function stands where a library keeps one that we replace."""

    ORIGINAL = "the library's own"
    OURS = "ours"
    FOREIGN = "of another package: a spy, a profiler, a change of the result; perhaps around ours"
    EMPTY = "nobody's"


def slot_of(owner: Any, name: str, library: Library) -> Slot:
    """Whose function stands there."""
    function = owner.__dict__.get(name)
    if function is None:
        return Slot.EMPTY
    if function in [replacement.function for replacement in library.replacements.values()]:
        return Slot.OURS
    return Slot.ORIGINAL if _defined_in(_plain(function)) == library.name else Slot.FOREIGN


def _plain(function: Any) -> Any:
    """Without ``torch.compiler.disable``, with which timm decorates some."""
    is_disabled = getattr(function, "__globals__", {}).get("__name__", "").startswith("torch._dynamo.")
    return getattr(function, "__wrapped__", function) if is_disabled else function


def _defined_in(function: Any) -> str:
    """The library in which a function was defined; a wrapper cannot copy that from what it wraps."""
    return getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0]


def describe_foreign(owner: Any, name: str) -> str:
    """Whose function stands there, in words."""
    function = owner.__dict__[name]
    kind = type(function)
    who = f"{_defined_in(function) or kind.__module__}.{getattr(function, '__qualname__', kind.__name__)}"
    return f"{owner.__name__}.{name} is not the library's own but {who}"


def changed(library: Library, module: Any, *names: str) -> str | None:
    """Which of these methods of a module, that the library's own code calls and ours does not, is another's: in words.

    None if none is, or in a graph. So a subclass, a patch and a hook keep their effect.
    """
    if module is None or recorded():
        return None
    ours = [replacement.function for replacement in library.replacements.values()]
    for name in names:
        function = vars(module).get(name, getattr(type(module), name, None))
        if function is not None and function not in ours and _defined_in(_plain(function)) != library.name:
            return f"{type(module).__name__}.{name} (not the library's own)"
    hooked = "forward" in names and (module._forward_hooks or module._forward_pre_hooks)
    return f"a hook of {type(module).__name__}" if hooked else None


def version_of(library: Library) -> tuple[int, ...]:
    """The first three numbers of the installed release's version.

    Raises:
        RuntimeError: it is older than the oldest that we know.
    """
    installed = sys.modules[library.name].__version__
    found = tuple(int(n) for n in re.findall(r"\d+", installed)[:3])
    if found < library.oldest:
        needed = ".".join(map(str, library.oldest))
        raise RuntimeError(f"timm_naflex_fast needs {library.name} >= {needed}; installed is {installed}")
    return found


def check(library: Library, places: Iterable[Place]) -> None:
    """Check what we are about to replace.

    Raises:
        RuntimeError: a method is missing or takes other arguments (names, order, kinds, defaults) than ours, or, in a
            release newer than any that we know, one reads other attributes or is not called any more; names all.
    """
    wrong, newer = [], version_of(library) > library.newest
    for owner, name, replacement in places:
        method = owner.__dict__.get(name)
        if method is None:
            wrong.append(f"{owner.__name__}.{name} is missing")
        elif _arguments(method) != _arguments(replacement.function):
            wrong.append(f"{owner.__name__}.{name} takes {inspect.signature(method)}")
        elif newer and replacement.self_attributes is not None:
            wrong += _changes(owner, name, replacement.self_attributes)
            if name.startswith("_") and name not in attributes_read(owner):
                wrong.append(f"{owner.__name__} does not call {name} any more")
    for (home, name), known in library.copied_methods.items() if newer else ():
        module, _, cls = home.partition(":")
        owner = getattr(sys.modules.get(module), cls, None)
        if owner is not None:  # we leave a class that is missing to the library's own code
            wrong += _changes(owner, name, known)
    if wrong:
        raise unsupported(library, "; ".join(wrong))


def unsupported(library: Library, wrong: str) -> RuntimeError:
    """The error for a release that is not supported."""
    installed = sys.modules[library.name].__version__
    oldest, newest = (".".join(map(str, version)) for version in (library.oldest, library.newest))
    return RuntimeError(
        f"{library.name} {installed} is not supported by this timm_naflex_fast ({oldest} to {newest} are, and newer "
        f"ones as long as what it replaces is the same): {wrong}. Nothing was changed"
    )


def attributes_read(function: Any) -> frozenset[str]:
    """The attributes of ``self`` that a function, or any method of a class, reads, by ``getattr`` too.

    Raises:
        OSError: there is no source.
    """
    found = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Load()):
                found.add(name)
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"), args=[ast.Name(id="self"), ast.Constant(value=str(name)), *_]
            ):
                found.add(name)
    return frozenset(found)


def _changes(owner: Any, name: str, known: str) -> list[str]:
    key = f"{owner.__name__}.{name}"
    if name not in owner.__dict__:
        return [f"{key} is missing"]
    try:
        now, before = attributes_read(owner.__dict__[name]), frozenset(known.split())
    except OSError:
        return [f"{key} cannot be checked without its source"]
    return [
        f"{key} {verb} {', '.join(sorted(names))}"
        for verb, names in (("now reads", now - before), ("no longer reads", before - now))
        if names
    ]


@lru_cache(maxsize=128)
def _arguments(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
