"""Which classes resize a position table by code of their own, in which nothing is replaced.

One rule for all libraries and releases, by the names in a class's code: no list of classes.

Tests: tests/patching/test_not_served.py.
"""

import re
from collections.abc import Iterable, Iterator
from types import CodeType

from torch import nn

from .library import Library

TABLE = re.compile(r"pos(ition)?(al)?_?(emb|enc)")  # of an attribute, at its beginning
MADE_BY = {"Parameter", "Embedding"}
# In the name of a method or of what it calls. Every model of transformers has another one,
# "resize_position_embeddings", for another number of words.
RESIZES = re.compile("interpolat|resample_|grid_sample|resize_positional")
# How the names of the files begin that transformers imports when a model is made. The second: code
# that comes with a checkpoint (``trust_remote_code``).
LOADED_WITH_MODELS = ("transformers.models.", "transformers_modules.")


def resizes_table(cls: type) -> bool:
    """Whether a class of modules makes a position table and names something that resizes."""
    names: set[str] = set()
    made: set[str] = set()
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for method, function in vars(base).items():
            function = getattr(function, "__func__", function)  # of a static method
            inside = set(_names_in(getattr(function, "__code__", None)))
            names |= inside | {method}
            if method == "__init__":
                made |= inside
    has_table = not made.isdisjoint(MADE_BY) and any(map(TABLE.match, made))
    return has_table and any(map(RESIZES.search, names))


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
