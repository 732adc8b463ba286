"""The ``Library`` that each library's file defines, and what its replacements ask.

``decide`` tells what computes a component: ours, as chosen, or the library's own code. ``original``
finds that.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MethodType, ModuleType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..strategies import STRATEGIES
from ..tracing import (
    Context,
    constant_while_traced,
    context_of,
    why_unsupported,
    why_unsupported_in_eager,
)
from .choices import SETTINGS_ATTRIBUTE, STOCK, Counts, Settings

Key = tuple[str, str]
"""("module:Class", method), or ("module:", function)."""
Author = Literal["ours", "original", "foreign"]
Target = tuple[Any, str, Key]
"""The class or module that holds what we replace, its name there, and its key."""


class Replacement(NamedTuple):
    """What takes the place of a method."""

    component: str
    function: Callable[..., Any]
    strategies: Mapping[
        str, str
    ]  # by the component's mode; the library's own code under every other mode
    attributes: str | None = (
        None  # those of ``self`` that the newest known release names there; None: not looked at
    )
    counted_elsewhere: bool = (
        False  # the library's own code calls another replaced function, which counts
    )
    # What the library's code calls and ours does not: ("", method), (submodule, method),
    # ("module:", function).
    skips: tuple[Key, ...] = ()
    not_exported: str | None = None  # why it cannot run by a strategy in an exported graph


@dataclass(eq=False)
class Library:
    """A library whose methods we replace."""

    name: str
    oldest: tuple[int, ...]
    newest: tuple[int, ...]  # of the releases that we know
    replacements: Mapping[Key, Replacement]
    model_classes: tuple[str, ...] = ()  # every model that we speed up contains one of these
    example: str = ""  # such a model, in the words of an error
    copied_methods: Mapping[Key, str] = field(default_factory=dict)  # and the attributes they name
    notes: Mapping[tuple[int, ...], str] = field(
        default_factory=dict
    )  # for ``status()``: on releases before a version
    settings: Settings = (
        STOCK  # those of the newest ``enable()``, for every model that has none of its own
    )

    def __post_init__(self) -> None:
        """A pickle holds a function by name: the library's, so that it can be read without this
        package."""
        for (path, name), (_, function, *_) in self.replacements.items():
            module, cls = path.split(":")
            function.__module__, function.__name__ = module, name
            function.__qualname__ = f"{cls}.{name}" if cls else name


class Decision(NamedTuple):
    """What computes a component."""

    strategy: str  # "stock": the library's own code
    tables: tuple[Tensor, ...]
    context: Context
    settings: Settings  # of the module, else those for every model


AS_INTERPOLATE = {
    name: name for name, strategy in STRATEGIES.items() if strategy.reference == "interpolate"
}
"""The strategies, by mode, where nothing was ever trained with timm's
``pos_embed_use_grid_sample``."""

originals: dict[Key, Callable[..., Any]] = {}
"""The libraries' own functions: entered before ours take their places, deleted after ours are
gone."""
saved: dict[Key, Callable[..., Any]] = {}
"""The same, never deleted: another package may have saved ours, and call it when it is gone."""

warned: set[str] = set()
call_counts = Counts()
"""What counts at present: the counters of the newest ``enable()``."""


def original(key: Key, *, is_called: bool = True) -> Callable[..., Any]:
    """The library's own method or function, whether or not ours is in its place.

    ``is_called``: ours was called. If it is not in place, then by who saved it, perhaps by what is
    there now.
    """
    function = originals.get(key) or (saved.get(key) if is_called else None)
    return getattr(owner_of(key[0]), key[1]) if function is None else function


def owner_of(path: str) -> Any:
    """The class ("module:Class") or module ("module:"); None if it is not loaded."""
    module_name, cls = path.split(":")
    module = sys.modules.get(module_name)
    return getattr(module, cls, None) if cls else module


def targets(library: Library) -> Iterator[Target]:
    """What a library has loaded of all that we replace."""
    for path, name in library.replacements:
        if (owner := owner_of(path)) is not None:
            yield owner, name, (path, name)


def imported_targets(library: Library) -> list[Target]:
    """The same, and the modules of the library that imported one of these functions by name."""
    result = list(targets(library))
    inside = [
        module for name, module in list(sys.modules.items()) if name.startswith(f"{library.name}.")
    ]
    for owner, name, key in tuple(result):
        if not isinstance(owner, type):
            pair = library.replacements[key].function, originals.get(key, vars(owner).get(name))
            others = [
                module
                for module in inside
                if module is not owner and isinstance(module, ModuleType)
            ]
            result += [
                (module, name, key)
                for module in others
                if name in vars(module) and vars(module)[name] in pair
            ]
    return result


def decide(
    library: Library,
    key: Key,
    module: nn.Module | None,
    *tensors: Tensor,
    tables_at: tuple[Any, ...] = (),
    reason: str | None = None,
) -> Decision:
    """What computes a component, and from what. Counted.

    Args:
        library: whose replacements have the entry ``key``.
        key: the entry's key.
        module: whose own settings hold; None: those for every model.
        tensors: the method's arguments that the component computes with.
        tables_at: a module, and the names of its tensors that the component computes with. They are
            read once, and only if ours may run: a parametrized table is computed anew each time
            that it is read.
        reason: why the library's own code has to run, if the caller knows.

    Raises:
        RuntimeError: the library's own code has to run, and ``enable(strict=True)`` forbids it.
    """
    # A module takes 2 us to say that it lacks an attribute, but TorchDynamo would not notice an
    # absent key of __dict__.
    in_python = isinstance(module, nn.Module) and not torch.compiler.is_dynamo_compiling()
    of_model = (
        module.__dict__.get(SETTINGS_ATTRIBUTE)
        if in_python
        else getattr(module, SETTINGS_ATTRIBUTE, None)
    )
    settings = (
        library.settings if of_model is None or of_model.settings is None else of_model.settings
    )
    replacement = library.replacements[key]
    strategy = replacement.strategies.get(getattr(settings, replacement.component), "stock")
    tables: tuple[Tensor, ...] = ()
    context = None
    if strategy == "stock":
        reason = None
    else:
        context = context_of(*tensors)
        if reason is None and context is not None and tensors:
            reason = why_unsupported(*tensors)
        if reason is None and context == "export":
            reason = replacement.not_exported
        if reason is None:
            reason = overridden_by(library, module, replacement.skips)
        if reason is None and tables_at:
            for name in tables_at[1:]:
                tables += (getattr(tables_at[0], name),)
            reason = (
                why_unsupported_in_eager(*tables) if context is None else why_unsupported(*tables)
            )
        if reason is not None:
            strategy, tables = "stock", ()
    if reason is not None and not replacement.counted_elsewhere:
        record_fallback(library, replacement.component, settings, reason)
    elif strategy != "stock" or not replacement.counted_elsewhere:
        record_call(replacement.component, strategy)
    return Decision(strategy, tables, context, settings)


def record_fallback(library: Library, component: str, settings: Settings, reason: str) -> None:
    """Count that the library's own code runs in place of what was chosen.

    Raises:
        RuntimeError: ``enable(strict=True)`` forbids it.
    """
    if settings.strict:
        raise RuntimeError(
            f"{reason} needs {library.name}'s own code, and enable(strict=True) forbids it"
        )
    record_call(component, "stock", reason, library.name)


def overridden_by(library: Library, module: Any, skips: tuple[Key, ...]) -> str | None:
    """What another has changed of all that the library's own code calls and ours does not, in
    words; None: nothing.

    So a subclass, a patch and a hook keep their effect, but in a graph of ``torch.compile``, which
    cannot ask.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    for path, name in skips:
        owner = owner_of(path) if ":" in path else getattr(module, path, None) if path else module
        function = getattr(owner, "__dict__", {}).get(name, getattr(type(owner), name, None))
        foreign = function is not None and author_of(function, library) == "foreign"
        called = (
            name == "forward" and owner is not None
        )  # by calling the module, whatever ``forward`` it has
        if (
            foreign
            or getattr(function, "__self__", owner) is not owner
            or (called and is_hooked(owner))
        ):
            return (
                f"{getattr(owner, '__name__', type(owner).__name__)}.{name} (not the library's own)"
            )
    return None


def is_hooked(module: Any) -> bool:
    """Whether to call the module does more than its ``forward`` does."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks = any(
        getattr(module, kind, None) or getattr(nn.modules.module, f"_global{kind}")
        for kind in kinds
    )
    return hooks or type(module).__call__ is not nn.Module.__call__


def author_of(function: Any, library: Library) -> Author:
    """Who wrote a function: "ours", "original", "foreign" (a spy, a change of the result, perhaps
    around ours).

    A wrapper can copy the name of what it wraps, but not its ``__globals__``; a proxy has those
    too, and another type.
    """
    function = function.__func__ if type(function) is MethodType else function
    if any(function is replacement.function for replacement in library.replacements.values()):
        return "ours"
    # torch.compiler.disable, and its twin that imports nothing, which no library of ours uses yet.
    if defined_in(function).startswith(("torch._dynamo.", "torch._compile")):
        function = vars(function).get("__wrapped__")
    return "original" if defined_in(function).partition(".")[0] == library.name else "foreign"


def defined_in(function: Any) -> str:
    """The module in which a function was defined; "" for what is no function, a proxy of one
    too."""
    return str(function.__globals__.get("__name__", "")) if type(function) is FunctionType else ""


# The compiler calls this when it traces, which is what then counts. Traced itself, it would guard
# on the counts.
@constant_while_traced
def record_call(
    component: str, strategy: str, reason: str | None = None, library: str = ""
) -> None:
    """Count one call for ``status()``; warn once of each reason why the library's own code has to
    run."""
    call_counts.calls[component, strategy] += 1
    if reason is not None:
        call_counts.fallbacks[reason] += 1
        warn_once(f"{reason} stays with {library}'s own code", 7)


def warn_once(message: str, stacklevel: int) -> None:
    """Warn, if this has not been said before in this process."""
    if message not in warned:
        warned.add(message)
        warnings.warn(f"timm_naflex_fast: {message}", stacklevel=stacklevel)
