"""What computes a component now: ours, as chosen, or the library's own code; and the counts.

``choose`` tells, and ``count`` counts it.
"""

import re
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..tracing import Context, constant_while_traced, context_of, why_unsupported
from .choices import CHOICES_ATTRIBUTE, STOCK, Counts, Settings
from .library import Key, Library
from .others import overridden_by


class Decision(NamedTuple):
    """What computes a component."""

    strategy: str  # "stock": the library's own code
    settings: Settings  # of the module, else those for every model
    tables: tuple[Tensor, ...] = ()
    context: Context = None
    reason: str | None = None  # why the library's own code has to run, if ours was chosen


call_counts = Counts()
"""What counts at present: the counters of the newest ``enable()``."""


def settings_for(module: nn.Module | None, library: Library) -> Settings:
    """What the user chose for this module, else for every model."""
    if isinstance(module, nn.Module) and not torch.compiler.is_dynamo_compiling():
        own = module.__dict__.get(CHOICES_ATTRIBUTE)
    else:
        # A module takes 2 us to say that it lacks an attribute, but TorchDynamo would not notice
        # an absent key of __dict__.
        own = getattr(module, CHOICES_ATTRIBUTE, None)
    if own is not None and own.settings is not None:
        return own.settings
    # For every model; the property would be one more call in each call.
    return library.choices.settings or STOCK


def choose(
    library: Library,
    key: Key,
    module: nn.Module | None,
    *tensors: Tensor,
    tables_at: tuple[Any, ...] = (),
    reason: str | None = None,
) -> Decision:
    """What computes a component, and from what. Not counted.

    Args:
        library: whose replacements have the entry ``key``.
        key: the entry's key.
        module: whose own settings hold; None: those for every model.
        tensors: the method's arguments that the component computes with.
        tables_at: a module, and the names of its tensors that the component computes with. They are
            read once, and only if ours may run: a parametrized table is computed anew each time
            that it is read.
        reason: why the library's own code has to run, if the caller knows.
    """
    settings = settings_for(module, library)
    replacement = library.replacements[key]
    strategy = replacement.strategies.get(getattr(settings, replacement.component), "stock")
    if strategy == "stock":
        return Decision("stock", settings)

    # Ours was chosen. Does anything forbid it? First what costs least to ask.
    if reason is None and replacement.skips:
        reason = overridden_by(library, module, replacement.skips)
    if reason is not None:
        return Decision("stock", settings, reason=reason)

    # Then what reads the tables; and of all tensors at once, whether our sums can take them.
    tables: tuple[Tensor, ...] = ()
    for name in tables_at[1:]:
        tables += (getattr(tables_at[0], name),)
    context = None
    if tensors or tables:
        context = context_of(*tensors, *tables)
    if context is not None:
        reason = why_unsupported(*tensors, *tables)
        if reason is not None:
            return Decision("stock", settings, reason=reason)
    return Decision(strategy, settings, tables, context)


def count(library: Library, key: Key, decision: Decision) -> None:
    """Count what a decision lets run, once: before the library's own code, or after ours.

    Raises:
        RuntimeError: the library's own code has to run, and ``enable(strict=True)`` forbids it.
    """
    if decision.reason is not None and decision.settings.strict:
        needs = f"{decision.reason} needs {library.name}'s own code"
        raise RuntimeError(f"{needs}, and enable(strict=True) forbids it")
    component = library.replacements[key].component
    record_call(component, decision.strategy, decision.reason, library.name)


def lacks_operator(device: torch.device, error: NotImplementedError) -> str:
    """Why the library's own code runs where a device lacks an operator of ours, in words."""
    named = re.search(r"aten[.:]+\w+", str(error))
    operator = "an operator" if named is None else named.group()
    return f"a device ({device.type}) without {operator}"


# The compiler calls this when it traces, which is what then counts. Traced itself, it would guard
# on the counts.
@constant_while_traced
def record_call(component: str, strategy: str, reason: str | None, library: str) -> None:
    """Count one call for ``status()``; at the first that the library's own code has to do, warn."""
    call_counts.calls[component, strategy] += 1
    if reason is not None:
        call_counts.fallbacks[reason] += 1
        if call_counts.fallbacks[reason] == 1:
            message = f"timm_naflex_fast: {reason} stays with {library}'s own code"
            # About the caller of the model's method: the library's file and this one lie between.
            warnings.warn(message, stacklevel=6)
