"""What serves a call: ours, as chosen, or the library's own code.

Every function that we put in a library hands its calls to ``serve``.

Tests: tests/patching/test_status.py.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..tracing import Context, context_of, why_unsupported
from . import counts
from .choices import CHOICES_ATTRIBUTE, STOCK, Settings
from .library import Key, Library, original
from .others import overridden_by

Ours = Callable[[str, tuple[Tensor, ...], Context], Any]
"""Computes a method's result: by a strategy, from the tables, in the context that ``context_of``
tells. Or it says in words why the library's own code has to run."""


def settings_for(module: Any, library: Library) -> Settings:
    """What the user chose for this module, else for every model; only the latter, if it is none."""
    own = None
    if isinstance(module, nn.Module):
        # A module takes 2 us to say that it lacks an attribute, but TorchDynamo would not notice
        # an absent key of __dict__.
        if torch.compiler.is_dynamo_compiling():
            own = getattr(module, CHOICES_ATTRIBUTE, None)
        else:
            own = module.__dict__.get(CHOICES_ATTRIBUTE)
    if own is not None and own.settings is not None:
        return own.settings
    # For every model; the property would be one more call in each call.
    return library.choices.settings or STOCK


def serve(
    library: Library,
    key: Key,
    arguments: tuple[Any, ...],
    ours: Ours,
    *tensors: Tensor,
    tables_at: tuple[Any, ...] = (),
    reason: str | None = None,
) -> Any:
    """The result of a method: by ours, or by the library's own code, as chosen.

    It is counted once: before the library's own code, or after ours.

    Args:
        library: whose replacements have the entry ``key``.
        key: the entry's key.
        arguments: of the library's own method, or function; first the module that has the method.
        ours: see ``Ours``.
        tensors: the method's arguments that ours computes with.
        tables_at: a module, and the names of its tensors that ours computes with. They are read
            once, and only if ours may run: a parametrized table is computed anew each time that it
            is read.
        reason: why the library's own code has to run, if the caller knows.

    Raises:
        RuntimeError: the library's own code has to run, and ``enable(strict=True)`` forbids it.
    """
    settings = settings_for(arguments[0], library)
    replacement = library.replacements[key]
    mode = getattr(settings, replacement.component)
    strategy = replacement.strategies.get(mode, "stock")
    own = key
    if strategy == "stock":
        reason = None
    else:
        result = reason
        if reason is None and replacement.skips:
            result = overridden_by(library, arguments[0], replacement.skips)
        if result is None:
            result = by_ours(ours, strategy, tensors, tables_at)
        if not isinstance(result, str):
            counts.record_call(replacement.component, strategy, None, library.name)
            return result
        if settings.strict:
            needs = f"{result} needs {library.name}'s own code"
            raise RuntimeError(f"{needs}, and enable(strict=True) forbids it")
        reason = result
        own = replacement.own.get(mode, key)
    if replacement.counts_own:
        counts.record_call(replacement.component, "stock", reason, library.name)
    return original(own)(*arguments)


def by_ours(
    ours: Ours, strategy: str, tensors: tuple[Tensor, ...], tables_at: tuple[Any, ...]
) -> Any:
    """The result of ours; or in words why the library's own code has to run."""
    tables: tuple[Tensor, ...] = ()
    for name in tables_at[1:]:
        tables += (getattr(tables_at[0], name),)
    context = None
    if tensors:
        context = context_of(*tensors, *tables)
    # Of all tensors at once: can our sums take them?
    if context is not None:
        reason = why_unsupported(*tensors, *tables)
        if reason is not None:
            return reason
    try:
        return ours(strategy, tables, context)
    except NotImplementedError as error:
        # PyTorch names the operator; any other is an error of the user's, as of a hook.
        named = re.search(r"aten[.:]+\w+", str(error))
        if named is None or not tensors:
            raise
        return f"a device ({tensors[0].device.type}) without {named.group()}"
