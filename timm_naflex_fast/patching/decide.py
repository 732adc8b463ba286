"""What serves a call: ours, as chosen, or the library's own code.

Every function that we put in a library hands its calls to ``serve``.

Tests: tests/patching/test_status.py.
"""

import re
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
    gives the method's result. Or it says in words why the library's own code has to run: "" where
    that is as it should be.
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
            return serve(self, arguments, options)

        self.compute = compute
        self.function = function
        self.library.replacements[self.key] = self
        return compute


def settings_for(module: Any, library: Library) -> Settings:
    """What the user chose for this module, else for every model; only the latter, if it is none."""
    own: Any = ()
    is_traced = torch.compiler.is_dynamo_compiling()
    if is_traced:
        graphs.note_guard_filter()
    if isinstance(module, nn.Module):
        # A module takes 2 us to say that it lacks an attribute, but TorchDynamo would not notice
        # an absent key of __dict__.
        if is_traced:
            own = getattr(module, CHOICES_ATTRIBUTE, ())
        else:
            own = module.__dict__.get(CHOICES_ATTRIBUTE, ())
    for choices in (own, getattr(library, CHOICES_ATTRIBUTE, ())):
        # None: of a module that was unpickled.
        for choice in reversed(choices or ()):
            if choice is not None and not choice.ended:
                return choice.settings
    return STOCK


def serve(replacement: Replacement, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The result of a method: by ours, or by the library's own code, as chosen.

    It is counted once: before the library's own code, or after ours.

    Args:
        replacement: of the method, or function.
        arguments: of the method; first the module that has it.
        options: its arguments by name.

    Raises:
        RuntimeError: the library's own code has to run, and ``enable(strict=True)`` forbids it.
    """
    library = replacement.library
    module = arguments[0] if arguments else None
    settings = settings_for(module, library)
    mode = getattr(settings, replacement.component)
    strategy = replacement.strategies.get(mode, "stock")
    if replacement.is_static and isinstance(module, nn.Module):
        arguments = arguments[1:]
    own = replacement.key
    reason = ""
    if strategy != "stock":
        result = _by_ours(replacement, strategy, arguments, options)
        if not isinstance(result, str):
            counts.record_call(replacement.component, strategy, "", library.name)
            return result
        reason = result
        if reason and settings.strict:
            raise RuntimeError(
                f"{reason} needs {library.name}'s own code, and enable(strict=True) forbids it"
            )
        own = replacement.own.get(mode, own)
    counts.record_call(replacement.component, "stock", reason, library.name)
    return library.replacements[own].original(*arguments, **options)


def _by_ours(
    replacement: Replacement, strategy: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """The result of ours; or in words why the library's own code has to run."""
    try:
        return replacement.compute(strategy, *arguments, **options)
    except NotImplementedError as error:
        # PyTorch names the operator; any other is an error of the user's, as of a hook.
        operator = re.search(r"aten[.:]+\w+", str(error))
        if operator is None:
            raise
        return f"a device without {operator.group()}"
