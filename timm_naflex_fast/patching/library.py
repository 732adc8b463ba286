"""The ``Library`` that each library's file defines, and two functions for its replacements.

``runs`` decides who computes a step: ours, as chosen, or the library's own code. ``original`` finds that code.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..tracing import why_unsupported
from .settings import STOCK, Flags, chosen


class Replacement(NamedTuple):
    """One entry of a library's table: what takes the place of a method."""

    step: str  # the flag that it obeys
    ours: Callable[..., Any]
    who: Mapping[str, str]  # who computes the step, by that flag; the library's own code under every other flag
    reads: str | None = None  # what the newest known release reads of ``self`` there; None: not looked at
    hands_on: bool = (
        False  # the library's own code calls another replaced function: that one is counted, this one is not
    )


@dataclass(eq=False)
class Library:
    """A library whose methods we replace."""

    name: str
    oldest: tuple[int, ...]
    newest: tuple[int, ...]  # of the releases that we know
    roots: tuple[str, ...]  # every model that we speed up contains one of these classes
    example: str  # such a model, in the words of an error
    modes: tuple[str, ...]
    table: Mapping[tuple[str, str], Replacement]  # by ("module:Class", method) or ("module:", function)
    reads: Mapping[tuple[str, str], str] = field(default_factory=dict)  # of methods that we copy but do not replace
    flags: Flags = STOCK  # the choice for every model that has none of its own


originals: dict[tuple[Any, str], Callable[..., Any]] = {}
"""The libraries' own methods by (class, name): entered before ours is set, deleted after it is removed."""

functions: dict[tuple[Any, str], Callable[..., Any]] = {}
"""The same by (module, name). Apart, because torch 2.11's compiler reads ``originals`` and cannot hash modules."""

warned: set[str] = set()
calls: Counter[tuple[str, str]] = Counter()
fallbacks: Counter[str] = Counter()


def original(owner: Any, name: str) -> Callable[..., Any]:
    """The library's own method of a class (or function of a module), whether or not ours is in its place."""
    kept = kept_by(owner)
    for place in getattr(owner, "__mro__", (owner,)):
        function = kept.get((place, name))
        if function is not None:
            return function
    return getattr(owner, name)


def kept_by(owner: Any) -> dict[tuple[Any, str], Callable[..., Any]]:
    """Where the own functions of a class or module are kept."""
    return originals if isinstance(owner, type) else functions


def runs(library: Library, module: nn.Module | None, key: tuple[str, str], *tensors: Tensor, unless: str | None) -> str:
    """Who computes a step on these tensors, by the library's table; "stock" is the library's own code. Counted.

    Args:
        library: whose table has the entry ``key``.
        module: whose own choice holds; None: the choice for every model.
        key: the entry's key.
        tensors: those that the step computes with.
        unless: why the library's own code must run, whatever is chosen; None: nothing speaks against ours.
    """
    replacement = library.table[key]
    wanted = replacement.who.get(chosen(module, replacement.step, library.flags), "stock")
    who, reason = decide(wanted, tensors, unless)
    if who != "stock" or not replacement.hands_on:
        count(library.name, replacement.step, who, reason)
    return who


def decide(wanted: str, tensors: tuple[Tensor, ...], unless: str | None) -> tuple[str, str | None]:
    """Who computes a step, and the reason if it is not ``wanted``. Without tensors, none is looked at."""
    reason = None if wanted == "stock" else unless or (why_unsupported(*tensors) if tensors else None)
    return (wanted, None) if reason is None else ("stock", reason)


# The compiler calls this when it traces, which is what then counts. Traced itself, it would guard on the counts.
@torch.compiler.assume_constant_result
def count(library: str, step: str, who: str, reason: str | None = None) -> None:
    """Count one call for ``status()``; warn once of each reason why the library's own code has to run."""
    calls[step, who] += 1
    if reason is not None:
        fallbacks[reason] += 1
        if reason not in warned:
            warned.add(reason)
            warnings.warn(f"timm_naflex_fast: {reason} stays with {library}'s own code", stacklevel=5)
