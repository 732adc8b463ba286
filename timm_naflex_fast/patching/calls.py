"""What a call asks: which settings hold, and so what serves it, ours or the library's own code; and
what is counted of it.

Tests: tests/patching/test_status.py.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..tracing import constant_while_traced
from .library import Key, Library

Function = Callable[..., Any]
CHOICES_ATTRIBUTE = "_naflex_fast_choices"


@dataclass(frozen=True)
class Settings:
    """What computes each component; ``"stock"`` is the library's own code."""

    pos_embed: str = "stock"
    patch_embed: str = "stock"
    rope: str = "stock"
    # Raise where the library's own code had to run.
    strict: bool = field(default=False, repr=False, compare=False)


STOCK = Settings()


@dataclass
class Counts:
    """What ran since an ``enable()``.

    ``calls``: how often each (component, strategy) ran: ("pos_embed", "matmul"), ("pos_embed",
    "stock"), ... ``fallbacks``: how often a library's own code ran although something else was
    chosen, by reason.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)

    # The compiler calls this when it traces, which is what then counts. Traced itself, it would
    # guard on the counts.
    @constant_while_traced
    def record(self, component: str, strategy: str, reason: str, library: str) -> None:
        """Count one call; at the first that the library's own code has to do, warn."""
        self.calls[component, strategy] += 1
        if reason:
            self.fallbacks[reason] += 1
            if self.fallbacks[reason] == 1:
                message = f"timm_naflex_fast: {reason} stays with {library}'s own code"
                # At the line that called the method: the library's, or the user's.
                warnings.warn(message, stacklevel=3)


call_counts = Counts()
"""What counts at present: the counters of the newest ``enable()``."""


@dataclass(eq=False)
class Replacement:
    """What takes the place of one method of a library.

    As a decorator it says what computes: a function (strategy, *arguments of the method) that
    gives the method's result. Or it says in words why the library's own code has to run, which is a
    RuntimeError under ``enable(strict=True)``; an empty string says that this code is what was chosen.
    """

    library: Library
    key: Key
    component: str
    # By the component's mode; the library's own code under every other mode.
    strategies: Mapping[str, str]
    # By mode: the library's own method that has its result, if it is another one.
    own: Mapping[str, Key] = field(default_factory=dict)
    # The library's own function. It stays here: another package may have saved ours, and call it
    # when it is gone.
    original: Any = None
    replaced: Any = None  # the same as its class has it, perhaps a static method
    is_static: bool = False

    def __call__(self, compute: Function) -> Function:
        """Let this function compute, from ``enable()`` on."""

        def function(*arguments: Any, **options: Any) -> Any:
            """The result by ours, or by the library's own code, as chosen.

            It is counted once: before the library's own code, or after ours.
            """
            module = arguments[0] if arguments else None
            settings = settings_for(module, self.library)
            if self.is_static and isinstance(module, nn.Module):
                arguments = arguments[1:]
            mode = getattr(settings, self.component)
            strategy = self.strategies.get(mode, "stock")
            result: Any = ""
            if strategy != "stock":
                result = compute(strategy, *arguments, **options)
            reason = result if isinstance(result, str) else ""
            if reason and settings.strict:
                raise RuntimeError(
                    f"{reason} needs {self.library.name}'s own code, and enable(strict=True) "
                    "forbids it"
                )
            if reason:
                strategy = "stock"
            call_counts.record(self.component, strategy, reason, self.library.name)
            if not isinstance(result, str):
                return result
            own = self.library.replacements[self.own.get(mode, self.key)]
            return own.original(*arguments, **options)

        self.compute = compute
        self.function = function
        self.library.replacements[self.key] = self
        return compute


def settings_for(module: Any, library: Library) -> Settings:
    """What the user chose for this module, else for every model; only the latter, if it is none."""
    choices = getattr(library, CHOICES_ATTRIBUTE, ())
    if isinstance(module, nn.Module):
        # A module takes 2 us to say that it lacks an attribute, but TorchDynamo would not notice
        # an absent key of __dict__.
        if torch.compiler.is_dynamo_compiling():
            choices += getattr(module, CHOICES_ATTRIBUTE, ())
        else:
            choices += module.__dict__.get(CHOICES_ATTRIBUTE, ())
    for choice in reversed(choices):
        if not choice.ended:
            return choice.settings
    return STOCK
