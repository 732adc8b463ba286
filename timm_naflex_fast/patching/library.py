"""The ``Library`` that each library's file defines, and two functions for its replacements.

``resolve_impl`` decides what computes a component: ours, as chosen, or the library's own code. ``original`` finds that.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..strategies import STRATEGIES
from ..tracing import why_unsupported
from .settings import STOCK, Counts, Settings, own_settings


class Replacement(NamedTuple):
    """What takes the place of a method."""

    component: str
    function: Callable[..., Any]
    impls: Mapping[str, str]  # by the component's mode; the library's own code under every other mode
    self_attributes: str | None = None  # those that the newest known release reads there; None: not looked at
    delegates: bool = False  # the library's own code calls another replaced function: that is counted in its place


@dataclass(eq=False)
class Library:
    """A library whose methods we replace."""

    name: str
    oldest: tuple[int, ...]
    newest: tuple[int, ...]  # of the releases that we know
    roots: tuple[str, ...]  # every model that we speed up contains one of these classes
    example: str  # such a model, in the words of an error
    modes: tuple[str, ...]
    replacements: Mapping[tuple[str, str], Replacement]  # by ("module:Class", method) or ("module:", function)
    copied_methods: Mapping[tuple[str, str], str] = field(default_factory=dict)  # and the attributes they read
    notes: Mapping[tuple[int, ...], str] = field(default_factory=dict)  # for ``status()``: on releases before a version
    settings: Settings = STOCK  # those of the newest ``enable()``, for every model that has none of its own


SAME_RESULT = {name: name for name, strategy in STRATEGIES.items() if strategy.reference == "interpolate"}
"""The impls, by mode, where nothing was ever trained with timm's ``pos_embed_use_grid_sample``."""

Place = tuple[Any, str, Replacement]
"""A class (or module) of the library, the name of its method (or function), and what takes its place."""

originals: dict[tuple[Any, str], Callable[..., Any]] = {}
"""The libraries' own methods by (class, name): entered before ours is set, deleted after it is removed."""

functions: dict[tuple[Any, str], Callable[..., Any]] = {}
"""The same by (module, name). Apart, because torch 2.11's compiler reads ``originals`` and cannot hash modules."""

warned: set[str] = set()
_counts = Counts()


def original(owner: Any, name: str) -> Callable[..., Any]:
    """The library's own method of a class (or function of a module), whether or not ours is in its place."""
    kept = originals_of(owner)
    for place in getattr(owner, "__mro__", (owner,)):
        function = kept.get((place, name))
        if function is not None:
            return function
    return getattr(owner, name)


def originals_of(owner: Any) -> dict[tuple[Any, str], Callable[..., Any]]:
    """Where the own functions of a class or module are kept."""
    return originals if isinstance(owner, type) else functions


def homes(library: Library) -> Iterator[Place]:
    """What a library has loaded of all that we replace."""
    for (home, name), replacement in library.replacements.items():
        module_name, _, cls = home.partition(":")
        owner = sys.modules.get(module_name)
        owner = getattr(owner, cls, None) if cls else owner
        if owner is not None:
            yield owner, name, replacement


def places(library: Library) -> list[Place]:
    """Every place that may hold ours: a function is also an attribute of the modules that imported it by name."""
    found: list[Place] = []
    for owner, name, replacement in homes(library):
        found.append((owner, name, replacement))
        for key, module in () if isinstance(owner, type) else list(sys.modules.items()):
            if key.startswith(f"{library.name}.") and isinstance(module, ModuleType) and module is not owner:
                function = module.__dict__.get(name)
                if function is replacement.function or getattr(function, "__globals__", None) is owner.__dict__:
                    found.append((module, name, replacement))
    return found


def resolve_impl(
    library: Library,
    module: nn.Module | None,
    key: tuple[str, str],
    *tensors: Tensor,
    inputs: Callable[[str], Any] = lambda impl: (),
) -> tuple[str, Any]:
    """What computes a component, and from what: (impl, inputs), or ("stock", why) for the library's own code. Counted.

    Args:
        library: whose replacements have the entry ``key``.
        module: whose own settings hold; None: those for every model.
        key: the entry's key.
        tensors: the method's arguments that the component computes with.
        inputs: gives, for an impl, what else it computes with: a tuple of tensors is looked at too; a string says why
            the library's own code has to run. Called once, and only if ours may run: a parametrized table is computed
            anew each time that it is read.
    """
    replacement = library.replacements[key]
    own = own_settings(module)
    mode = getattr(library.settings if own is None else own, replacement.component)
    impl, found = resolve(replacement.impls.get(mode, "stock"), tensors, inputs)
    if impl != "stock" or not replacement.delegates:
        record_call(library.name, replacement.component, impl, found if impl == "stock" else None)
    return impl, found


def resolve(wanted: str, tensors: tuple[Tensor, ...], inputs: Callable[[str], Any]) -> tuple[str, Any]:
    """``wanted`` and its inputs; or "stock" and the reason, None if it is wanted."""
    if wanted == "stock":
        return "stock", None
    reason = why_unsupported(*tensors) if tensors else None
    if reason is None:
        found = inputs(wanted)
        if isinstance(found, str):
            reason = found
        elif isinstance(found, tuple) and found:
            reason = why_unsupported(*found)
    return (wanted, found) if reason is None else ("stock", reason)


def counts() -> Counts:
    """What counts at present."""
    return _counts


def count_into(found: Counts | None) -> None:
    """Count into these, or from zero, from now on."""
    global _counts
    _counts = found or Counts()


# The compiler calls this when it traces, which is what then counts. Traced itself, it would guard on the counts.
@torch.compiler.assume_constant_result
def record_call(library: str, component: str, impl: str, reason: str | None = None) -> None:
    """Count one call for ``status()``; warn once of each reason why the library's own code has to run."""
    _counts.calls[component, impl] += 1
    if reason is not None:
        _counts.fallbacks[reason] += 1
        warn_once(f"{reason} stays with {library}'s own code", 6)


def warn_once(message: str, stacklevel: int) -> None:
    """Warn, if this has not been said before in this process."""
    if message not in warned:
        warned.add(message)
        warnings.warn(f"timm_naflex_fast: {message}", stacklevel=stacklevel)
