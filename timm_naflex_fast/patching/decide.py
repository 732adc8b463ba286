"""What serves a call: ours, as chosen, or the library's own code.

Every function that we put in a library hands its calls to ``serve``.

Tests: tests/patching/test_status.py.
"""

import re
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..tracing import context_of, why_unsupported
from . import counts, graphs
from .choices import CHOICES_ATTRIBUTE, STOCK, Settings
from .library import Library, Replacement, original, overridden_by


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


def serve(replacement: Replacement, *arguments: Any) -> Any:
    """The result of a method: by ours, or by the library's own code, as chosen.

    It is counted once: before the library's own code, or after ours.

    Args:
        replacement: of the method, or function.
        arguments: of the method; first the module that has it.

    Raises:
        RuntimeError: the library's own code has to run, and ``enable(strict=True)`` forbids it.
    """
    library = replacement.library
    settings = settings_for(arguments[0], library)
    mode = getattr(settings, replacement.component)
    strategy = replacement.strategies.get(mode, "stock")
    own = replacement.key
    reason = None
    if strategy != "stock":
        result = _by_ours(replacement, strategy, arguments)
        if not isinstance(result, str):
            counts.record_call(replacement.component, strategy, None, library.name)
            return result
        if settings.strict:
            needs = f"{result} needs {library.name}'s own code"
            raise RuntimeError(f"{needs}, and enable(strict=True) forbids it")
        reason = result
        own = replacement.own.get(mode, own)
    if replacement.counts_own:
        counts.record_call(replacement.component, "stock", reason, library.name)
    return original(own)(*arguments)


def _by_ours(replacement: Replacement, strategy: str, arguments: tuple[Any, ...]) -> Any:
    """The result of ours; or in words why the library's own code has to run."""
    reason = replacement.why_not(*arguments)
    if reason is None and replacement.skips:
        reason = overridden_by(replacement.library, arguments[0], replacement.skips)
    if reason is not None:
        return reason
    tensors = replacement.tensors(*arguments)
    context = None
    if tensors:
        context = context_of(*tensors)
    # Of all tensors at once: can our sums take them?
    if context is not None:
        reason = why_unsupported(*tensors)
        if reason is not None:
            return reason
    try:
        return replacement.compute(strategy, context, tensors, *arguments)
    except NotImplementedError as error:
        # PyTorch names the operator; any other is an error of the user's, as of a hook.
        named = re.search(r"aten[.:]+\w+", str(error))
        if named is None or not tensors:
            raise
        return f"a device ({tensors[0].device.type}) without {named.group()}"


def note_missed(replacement: Replacement, *, at: FrameType) -> None:
    """The library's own method runs: count it, if ours should have run in its place.

    That is so where ours did not hand it on, as somebody had saved it before ``enable()``.

    Args:
        replacement: of the method.
        at: the frame in which the library's own method runs.

    Raises:
        RuntimeError: ``enable(strict=True)`` forbids it.
    """
    frame: FrameType | None = at
    while frame is not None:
        if frame.f_code is serve.__code__ and frame.f_locals["replacement"] is replacement:
            return
        frame = frame.f_back
    library = replacement.library
    settings = settings_for(at.f_locals.get("self"), library)
    if getattr(settings, replacement.component) == "stock":
        return
    owner = replacement.key[0].partition(":")[2]
    reason = (
        f"a {owner}.{replacement.key[1]} that was saved or wrapped before enable(), as by "
        "accelerate's device_map,"
    )
    if settings.strict:
        raise RuntimeError(f"{reason} hides ours, and enable(strict=True) forbids it")
    counts.record_call(replacement.component, "stock", reason, library.name)
