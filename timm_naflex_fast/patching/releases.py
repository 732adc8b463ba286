"""Whether an installed library is one that we know: its version, its own methods, their arguments,
what they read.

A method that reads another attribute of its module than it used to has gained or lost a setting,
and a method that nobody calls any more has been superseded. Replacing either would change results
without a word, so it is refused. Nothing is imported here: ``install`` holds its lock.
"""

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn

from .library import Library, Target, author_of, defined_in, originals, owner_of, targets


def look_up(user: Any, name: str) -> tuple[Any, Any]:
    """The object, class or module from which ``user`` has this method, and the method; (None, None)
    if it has none."""
    owners = user.__mro__ if isinstance(user, type) else (user, *type(user).__mro__)
    return next(
        ((owner, vars(owner)[name]) for owner in owners if name in vars(owner)), (None, None)
    )


def users_of(owner: Any, modules: Collection[nn.Module]) -> list[Any]:
    """Those of a model's modules that are of this class; if none is, the class itself and all
    derived from it."""
    if not isinstance(owner, type):  # a module of Python
        return [owner]
    below = [cls for derived in list[type](owner.__subclasses__()) for cls in users_of(derived, ())]
    return [module for module in modules if isinstance(module, owner)] or [owner, *below]


def foreign_methods(
    library: Library, modules: Collection[nn.Module] = (), *, subclasses: bool = True
) -> list[str]:
    """What stays in force where ours should be, in sentences: on these modules, or on the library's
    own classes.

    Without modules also on classes that are derived from them, unless ``subclasses`` is False:
    ``strict`` is not to raise for a derived class that nobody uses. Not named is what another has
    put over ours, and a subclass's method that calls the one it hides.
    """
    sentences = []
    for owner, name, key in targets(library):
        for user in users_of(owner, modules) if modules or subclasses else [owner]:
            actual, function = look_up(user, name)
            author = author_of(function, library)
            if actual is owner:
                stays = author == "foreign" and key not in originals
            else:
                calls_ours = name in getattr(
                    getattr(function, "__code__", None), "co_names", ()
                )  # as by super()
                stays = author != "ours" and actual is not None and not calls_ours
            if stays:
                kind = type(function)
                by = f"{defined_in(function) or kind.__module__}.{getattr(function, '__qualname__', kind.__name__)}"
                where = (
                    actual.__name__
                    if hasattr(actual, "__name__")
                    else f"one {type(actual).__name__}"
                )
                sentences.append(f"{where}.{name} is not the library's own but {by}")
    return list(dict.fromkeys(sentences))


def version_of(library: Library) -> tuple[int, ...]:
    """The first three numbers of the installed release's version."""
    return tuple(int(n) for n in re.findall(r"\d+", sys.modules[library.name].__version__)[:3])


def check_supported(library: Library, targets: Iterable[Target]) -> None:
    """Check what we are about to replace.

    Raises:
        RuntimeError: the library is too old, or a method is missing or takes other arguments
            (names, order, kinds, defaults) than ours, or, in a release newer than any that we know,
            one reads other attributes or is not called any more; names all.
    """
    version = version_of(library)
    wrong = ["it is too old"] if version < library.oldest else []
    for owner, name, key in targets:
        method = vars(owner).get(name)
        if method is None:
            wrong.append(f"{owner.__name__}.{name} is missing")
        elif _arguments(method) != _arguments(library.replacements[key].function):
            wrong.append(f"{owner.__name__}.{name} takes {inspect.signature(method)}")
    expected = {key: replacement.attributes for key, replacement in library.replacements.items()}
    for key, attributes in (
        {**expected, **library.copied_methods}.items() if version > library.newest else ()
    ):
        owner, name = owner_of(key[0]), key[1]
        if (
            owner is None or attributes is None
        ):  # we leave a class that is missing to the library's own code
            continue
        label = f"{owner.__name__}.{name}"
        try:
            if changed := attributes_of(originals.get(key) or getattr(owner, name)) ^ {
                *attributes.split()
            }:
                wrong.append(
                    f"{label} reads what it did not, or no longer: {', '.join(sorted(changed))}"
                )
            if name.startswith("_") and name not in attributes_of(owner):
                wrong.append(f"nothing calls {label} any more")
        except (AttributeError, OSError):
            wrong.append(f"{label} is missing, or has no source")
    if wrong:
        raise unsupported(library, "; ".join(wrong))


def unsupported(library: Library, wrong: str) -> RuntimeError:
    """The error for a release that is not supported."""
    installed = sys.modules[library.name].__version__
    oldest, newest = (".".join(map(str, version)) for version in (library.oldest, library.newest))
    return RuntimeError(
        f"{library.name} {installed} is not supported by this timm_naflex_fast ({oldest} to {newest} are, and newer "
        f"ones as long as what it replaces is the same): {wrong}. Nothing was changed"
    )


def attributes_of(function: Any) -> set[str]:
    """The attributes of ``self`` that a function, or any method of a class, names, by ``getattr``
    too.

    Of a function without ``self`` those of ``torch`` and ``F``.

    Raises:
        OSError: there is no source.
    """
    source = re.sub("#.*", "", inspect.getsource(function))
    of_self = r"""\b(?:self\.|(?:get|has)attr\(self, ["'])(\w+)"""
    return {
        *re.findall(of_self if re.search(r"\bself\b", source) else r"\b(?:torch|F)\.(\w+)", source)
    }


def _arguments(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
