"""The modes, and whose choice holds: a model's own, else the one for every model. Nothing here knows a library.

A model's choice is an attribute of its modules, so it goes along with ``deepcopy`` and EMA copies; it is no part of
``state_dict``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, cast
from uuid import uuid4

if TYPE_CHECKING:  # the commands read the names below, and answer without torch
    from torch import nn

Mode = Literal[
    "stock", "interpolate_cached", "grid_sample", "matmul", "interpolate-cached", "grid-sample", "matmul-resample"
]
MODES = ("stock", "interpolate_cached", "grid_sample", "matmul")
FLAGS = {"pos_embed": MODES, "patch_embed": ("stock", "matmul"), "rope": ("stock", "batched")}  # the last is fastest
ALIASES = {"matmul_resample": "matmul"}
MODE_VARIABLE = "TIMM_NAFLEX_FAST_MODE"
ATTRIBUTE = "_naflex_fast_choice"


@dataclass(frozen=True)
class Flags:
    """What computes each resampling step; ``"stock"`` is the library's own code."""

    pos_embed: str = "stock"
    patch_embed: str = "stock"
    rope: str = "stock"

    @property
    def is_stock(self) -> bool:
        """Whether the library's own code computes every step."""
        return self == STOCK


STOCK = Flags()


def check_name(flag: str, value: object, valid: Sequence[str]) -> str:
    """The name that ``value`` spells; ValueError with the valid ones if there is none."""
    if isinstance(value, str):
        name = value.replace("-", "_")
        name = ALIASES.get(name, name)
        if name in valid:
            return name
    raise ValueError(f"{value!r} is not valid for {flag}; valid: {', '.join(map(repr, valid))}")


def parse_flags(mode: str = "matmul", **overrides: str | None) -> Flags:
    """Flags for ``mode``; an argument that is given overrides its flag.

    ``mode`` is the strategy of the position embeddings, with the exact fast form of everything else;
    ``mode="stock"`` is the library's own code throughout.

    Raises:
        ValueError: an unknown name, with the valid ones.
    """
    mode = check_name("mode", mode, MODES)
    flags = {flag: "stock" if mode == "stock" else valid[-1] for flag, valid in FLAGS.items()} | {"pos_embed": mode}
    for flag, name in overrides.items():
        if name is not None:
            flags[flag] = check_name(flag, name, FLAGS[flag])
    return Flags(**flags)


def default_mode() -> Mode:
    """The mode of a command that was given none: the environment's ``TIMM_NAFLEX_FAST_MODE``, else "matmul".

    Raises:
        ValueError: the variable holds an unknown name; with the valid ones.
    """
    return cast(Mode, check_name(MODE_VARIABLE, os.environ.get(MODE_VARIABLE) or "matmul", MODES))


class ModelChoice:
    """The flags of one model, shared by its modules; None after the choice has ended.

    It pickles as a plain dict, which a process without this package can read. The dict counts only in the process that
    wrote it, until ``forget_models``: a choice from a file would otherwise take effect long after, unseen.
    """

    def __init__(self, flags: Flags) -> None:
        self.flags: Flags | None = flags
        _choices.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelChoice | None:
        return None if self.flags is None else ModelChoice(self.flags)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return dict, ({} if self.flags is None else dict(asdict(self.flags), token=_token),)


# The models that have a choice of their own.
_choices: weakref.WeakSet[ModelChoice] = weakref.WeakSet()
_modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # copies are missing here
_token = uuid4().hex  # marks pickled choices; another one in every process


def chosen(module: nn.Module | None, step: str, everywhere: Flags) -> str:
    """The flag of one step that holds for a module: its own, else that of ``everywhere``. May be traced.

    Under ``torch.compile`` it reads through ``hasattr``: the compiler checks before each call whether the answer is
    still the same. It does not check whether a key is missing in ``__dict__``. Nothing is written while tracing.
    """
    import torch

    if module is None or not torch.compiler.is_dynamo_compiling():
        return getattr((None if module is None else own_flags(module)) or everywhere, step)
    own: Any = getattr(module, ATTRIBUTE) if hasattr(module, ATTRIBUTE) else None
    if isinstance(own, dict):  # unpickled, and compiled before it ran
        return own[step] if own.get("token") == _token else getattr(everywhere, step)
    return getattr(everywhere if own is None or own.flags is None else own.flags, step)


def own_flags(module: nn.Module) -> Flags | None:
    """A module's own choice, None if it has none. Not for traced code: an unpickled choice is replaced by ours."""
    choice = module.__dict__.get(ATTRIBUTE)
    if isinstance(choice, dict):
        flags = dict(choice)
        mine = flags.pop("token", None) == _token
        choice = module.__dict__[ATTRIBUTE] = ModelChoice(Flags(**flags)) if mine else None
    return choice.flags if choice is not None else None


def choose_for(choices: list[tuple[nn.Module, Flags | None]]) -> None:
    """Give each module its own choice; None takes it away."""
    made: dict[Flags, ModelChoice] = {}
    for module, own in choices:
        if own is None:
            module.__dict__.pop(ATTRIBUTE, None)
        else:
            _modules.add(module)  # first: whatever has a choice can be found
            module.__dict__[ATTRIBUTE] = made[own] = made.get(own) or ModelChoice(own)


def forget_models() -> None:
    """End every model's own choice, those of copies and of pickled models too."""
    global _token
    _token = uuid4().hex
    choose_for([(module, None) for module in list(_modules)])
    for choice in list(_choices):  # those of copies, which nobody told us of
        choice.flags = None


def models_flags() -> list[Flags]:
    """The choices of models at present, one per model (and copy)."""
    return [choice.flags for choice in list(_choices) if choice.flags is not None]
