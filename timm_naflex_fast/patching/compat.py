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
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from typing import Any

from torch import nn

from .library import Library, Target, defined_in, originals, owner_of, targets, whose


def found_at(holder: Any, name: str) -> tuple[Any, Any]:
    """The object, class or module that gives ``holder`` this method, and the method; (None, None) if nothing does."""
    classes = holder.__mro__ if isinstance(holder, type) else (holder, *type(holder).__mro__)
    return next(((place, vars(place)[name]) for place in classes if name in vars(place)), (None, None))


def not_ours(
    library: Library, modules: Collection[nn.Module] = (), *, around_ours: bool = True, subclasses: bool = True
) -> list[str]:
    """What stays in force where ours should be, in sentences: on these modules and their classes.

    Without ``modules``: on the library's own classes and what is derived from them. ``around_ours``: also what another
    has put over ours, and may call it. A subclass's method that calls the one it hides is not named.
    """
    sentences = []
    for owner, name, key in targets(library):
        holders = [module for module in modules if isinstance(owner, type) and isinstance(module, owner)]
        for holder in holders if modules else with_subclasses(owner) if subclasses else [owner]:
            place, function = found_at(holder, name)
            who = whose(function, library)
            if who == "another's" and place is owner:
                stays = around_ours or key not in originals
            else:
                calls_ours = name in getattr(getattr(function, "__code__", None), "co_names", ())  # as by super()
                stays = who != "ours" and place not in (owner, None) and not calls_ours
            if stays:
                kind = type(function)
                by = f"{defined_in(function) or kind.__module__}.{getattr(function, '__qualname__', kind.__name__)}"
                where = place.__name__ if hasattr(place, "__name__") else f"one {type(place).__name__}"
                sentences.append(f"{where}.{name} is not the library's own but {by}")
    return list(dict.fromkeys(sentences))


def with_subclasses(owner: Any) -> list[Any]:
    """A class and all that is derived from it; a module alone."""
    below: list[type] = owner.__subclasses__() if isinstance(owner, type) else []
    return [owner, *(cls for direct in below for cls in with_subclasses(direct))]


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


def check(library: Library, found: Iterable[Target]) -> None:
    """Check what we are about to replace.

    Raises:
        RuntimeError: a method is missing or takes other arguments (names, order, kinds, defaults) than ours, or, in a
            release newer than any that we know, one reads other attributes or is not called any more; names all.
    """
    wrong, newer = [], version_of(library) > library.newest
    for owner, name, key in found:
        method, replacement = owner.__dict__.get(name), library.replacements[key]
        if method is None:
            wrong.append(f"{owner.__name__}.{name} is missing")
        elif _arguments(method) != _arguments(replacement.function):
            wrong.append(f"{owner.__name__}.{name} takes {inspect.signature(method)}")
        elif newer and replacement.self_attributes is not None:
            wrong += _changes(owner, name, replacement.self_attributes)
            if name.startswith("_") and name not in attributes_read(owner):
                wrong.append(f"{owner.__name__} does not call {name} any more")
    for (home, name), known in library.copied_methods.items() if newer else ():
        owner = owner_of(home)
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
