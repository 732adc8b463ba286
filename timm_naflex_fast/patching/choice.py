"""Whose choice holds: a model's own, else the global one. Nothing here knows timm.

A model's choice is an attribute of its modules, so it goes along with ``deepcopy`` and EMA copies; it is no part of
``state_dict``.
"""

from __future__ import annotations

import weakref
from typing import Any
from uuid import uuid4

from torch import nn

from .modes import STOCK, Flags

ATTRIBUTE = "_naflex_fast_choice"

_global = STOCK
_token = uuid4().hex  # marks pickled choices; a new one after forget_all, and in every process
_choices: weakref.WeakSet[ModelChoice] = weakref.WeakSet()
_chosen: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class ModelChoice:
    """The flags of one model, shared by its modules; None once ended.

    Pickles as a plain dict that can be read without this package, and counts only where it was made: in this process,
    until ``forget_all``. A choice that came out of a file would otherwise take effect long after, unseen.
    """

    def __init__(self, flags: Flags) -> None:
        self.flags: Flags | None = flags
        _choices.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelChoice | None:
        return None if self.flags is None else ModelChoice(self.flags)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return dict, ({} if self.flags is None else dict(self.flags.as_dict(), token=_token),)


def own_flags(module: nn.Module) -> Flags | None:
    """A module's own choice, None where it has none."""
    choice = module.__dict__.get(ATTRIBUTE)
    if isinstance(choice, dict):  # unpickled
        flags = dict(choice)
        mine = flags.pop("token", None) == _token
        choice = module.__dict__[ATTRIBUTE] = ModelChoice(Flags(**flags)) if mine else None
    return choice.flags if choice is not None else None


def flags_for(module: nn.Module) -> Flags:
    """The flags that hold for a module."""
    return own_flags(module) or _global


def global_flags() -> Flags:
    """The choice for every model that has none of its own."""
    return _global


def choose_globally(flags: Flags) -> None:
    """Set the global choice; one assignment, so that another thread reads the old or the new."""
    global _global
    _global = flags


def choose(modules: list[nn.Module], flags: list[Flags | None]) -> None:
    """Give each module its own choice; None takes it away."""
    made: dict[Flags, ModelChoice] = {}
    for module, own in zip(modules, flags):
        if own is None:
            module.__dict__.pop(ATTRIBUTE, None)
        else:
            module.__dict__[ATTRIBUTE] = made[own] = made.get(own) or ModelChoice(own)
            _chosen.add(module)


def forget_all() -> None:
    """End the global choice and every model's own."""
    global _token
    choose_globally(STOCK)
    _token = uuid4().hex
    modules = list(_chosen)  # once: a weak set may shrink between two looks
    choose(modules, [None] * len(modules))
    for choice in list(_choices):  # those of copies, which nobody told us of
        choice.flags = None


def models_flags() -> list[Flags]:
    """The choices of models at present, one per model (and copy)."""
    return [choice.flags for choice in list(_choices) if choice.flags is not None]
