"""Which classes resize a position table by code of their own, in which nothing is replaced.

One rule for all libraries and releases, by the names in a class's code: no list of classes.

Tests: tests/patching/test_not_served.py.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType

from torch import nn

from .library import Library

POSITION = r"pos(ition)?(al)?_?(emb|enc)"
# "interpolate_pos_encoding", "resize_positional_embeddings": of a method, of what it calls, and
# of the class.
RESIZES_POSITIONS = re.compile(rf"(interpolat|resiz|resampl)\w*{POSITION}", re.IGNORECASE)
# What every model of transformers has, for another number of words.
FOR_TEXT = "resize_position_embeddings"
TABLE = re.compile(POSITION)  # of an attribute, at its beginning
MADE_BY = {"Parameter", "Embedding"}
RESIZED_BY = {"interpolate", "grid_sample"}
# How the names of the files begin that transformers imports when a model is made. The second: code
# that comes with a checkpoint (``trust_remote_code``).
LOADED_WITH_MODELS = ("transformers.models.", "transformers_modules.")


def resizes_table(cls: type) -> bool:
    """Whether a class of modules resizes a position table that it has learned.

    Either something is named so, or the class makes a table and calls a function of PyTorch that
    resizes.
    """
    names = {cls.__name__}
    made: set[str] = set()
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for method, function in vars(base).items():
            function = getattr(function, "__func__", function)  # of a static method
            if type(function) is FunctionType:
                inside = set(_names_in(function.__code__))
                names |= inside | {method}
                if method == "__init__":
                    made |= inside
    if any(map(RESIZES_POSITIONS.search, names - {FOR_TEXT})):
        return True
    has_table = not made.isdisjoint(MADE_BY) and any(map(TABLE.match, made))
    return has_table and not names.isdisjoint(RESIZED_BY)


def _names_in(code: CodeType) -> Iterator[str]:
    """The attributes and globals that a function names, those of functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def not_served(libraries: Iterable[Library], classes: Iterable[type]) -> list[str]:
    """Which of these classes nobody may take for one that is replaced, in sentences.

    Args:
        libraries: whose classes are known.
        classes: of a model's modules, or ``loaded_classes()``.
    """
    served: tuple[type, ...] = ()
    homes = {}
    for library in libraries:
        for owner in library.owners().values():
            if isinstance(owner, type):
                served += (owner,)
                homes[owner.__name__] = owner.__module__
    copies = []
    names = {}
    for cls in dict.fromkeys(classes):
        if issubclass(cls, served):
            continue
        if cls.__name__ in homes:
            home = homes[cls.__name__]
            copies.append(
                f"{cls.__name__} of {cls.__module__} is a copy of {home}'s; nothing is replaced in "
                "a copy"
            )
        elif resizes_table(cls):
            names[cls.__name__] = True
    if names:
        copies.append(
            f"nothing is replaced in {', '.join(names)}: position tables are resized there by "
            "other code, under every mode"
        )
    return copies


def loaded_classes() -> Iterator[type]:
    """The classes of modules in the files that transformers has loaded with models."""
    for name, file in list(sys.modules.items()):
        if name.startswith(LOADED_WITH_MODELS):
            for value in list(vars(file).values()):
                is_module = isinstance(value, type) and issubclass(value, nn.Module)
                if is_module and value.__module__ == name:
                    yield value
