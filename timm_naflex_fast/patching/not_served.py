"""Which classes resize a position table by code of their own, in which nothing is replaced.

One rule for all libraries and releases, by the names in a class's code: no list of classes.

Tests: tests/patching/test_not_served.py.
"""

import re
from collections.abc import Iterable, Iterator
from types import CodeType

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
            inside = set(_names_in(getattr(function, "__code__", None)))
            names |= inside | {method}
            if method == "__init__":
                made |= inside
    if any(map(RESIZES_POSITIONS.search, names - {FOR_TEXT})):
        return True
    has_table = not made.isdisjoint(MADE_BY) and any(map(TABLE.match, made))
    return has_table and not names.isdisjoint(RESIZED_BY)


def _names_in(code: object) -> Iterator[str]:
    """The attributes and globals that code names, that of functions inside it too."""
    if isinstance(code, CodeType):
        yield from code.co_names
        for constant in code.co_consts:
            yield from _names_in(constant)


def not_served(libraries: Iterable[Library], classes: Iterable[type]) -> list[str]:
    """A sentence on those of these classes that nobody may take for one that is replaced.

    Args:
        libraries: whose classes are replaced.
        classes: of a model's modules, or ``loaded_classes()``.
    """
    served: tuple[type, ...] = ()
    for library in libraries:
        served += library.classes()
    names = []
    for cls in dict.fromkeys(classes):
        if not issubclass(cls, served) and resizes_table(cls):
            names.append(f"{cls.__module__}.{cls.__name__}")
    if not names:
        return []
    return [
        f"nothing is replaced in {', '.join(names)}: position tables are resized there by other "
        "code, under every mode"
    ]


def loaded_classes() -> Iterator[type]:
    """The classes of modules in the files that transformers has loaded with models."""
    classes: list[type] = [nn.Module]
    for cls in classes:  # grows
        classes += cls.__subclasses__()
        if cls.__module__.startswith(LOADED_WITH_MODELS):
            yield cls
