"""What serves a call: ours, as chosen, or the library's own code.

Tests: tests/patching/test_status.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import counts, graphs
from .choices import CHOICES_ATTRIBUTE, STOCK, Settings
from .library import Key, Library

Function = Callable[..., Any]


@dataclass(eq=False)
class Replacement:
    """What takes the place of one method or function of a library.

    As a decorator it says what computes: a function (strategy, *arguments of the method) that
    gives the method's result. Or it says in words why the library's own code has to run, which is a
    RuntimeError under ``enable(strict=True)``.
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
            reason = ""
            if strategy != "stock":
                result = compute(strategy, *arguments, **options)
                if not isinstance(result, str):
                    counts.record_call(self.component, strategy, "", self.library.name)
                    return result
                reason = result
                if settings.strict:
                    raise RuntimeError(
                        f"{reason} needs {self.library.name}'s own code, and enable(strict=True) "
                        "forbids it"
                    )
            counts.record_call(self.component, "stock", reason, self.library.name)
            own = self.library.replacements[self.own.get(mode, self.key)]
            return own.original(*arguments, **options)

        self.compute = compute
        self.function = function
        self.library.replacements[self.key] = self
        return compute


def settings_for(module: Any, library: Library) -> Settings:
    """What the user chose for this module, else for every model; only the latter, if it is none."""
    choices = getattr(library, CHOICES_ATTRIBUTE, ())
    is_traced = torch.compiler.is_dynamo_compiling()
    if is_traced:
        graphs.note_guard_filter()
    if isinstance(module, nn.Module):
        # A module takes 2 us to say that it lacks an attribute, but TorchDynamo would not notice
        # an absent key of __dict__.
        if is_traced:
            choices += getattr(module, CHOICES_ATTRIBUTE, ())
        else:
            choices += module.__dict__.get(CHOICES_ATTRIBUTE, ())
    for choice in reversed(choices):
        if not choice.ended:
            return choice.settings
    return STOCK
