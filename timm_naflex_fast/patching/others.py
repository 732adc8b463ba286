"""What other packages changed of what we replace, or skip: patches, subclasses, hooks, wrappers.

Nothing here changes anything.
"""

import functools
import gc
from collections.abc import Collection, Iterable
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
from torch import nn

from .library import Library, Target, in_place, owner_of, targets

Author = Literal["ours", "original", "foreign"]


def author_of(function: Any, library: Library) -> Author:
    """Who wrote a function: "ours", "original", or "foreign", which may wrap one of the others.

    A wrapper can copy the name of what it wraps, but not its ``__globals__``; a proxy has those
    too, and another type.
    """
    if type(function) is MethodType:
        function = function.__func__
    for replacement in library.replacements.values():
        if function is replacement.function:
            return "ours"
    # torch.compiler.disable, and its twin that imports nothing.
    if defined_in(function).startswith(("torch._dynamo.", "torch._compile")):
        function = vars(function).get("__wrapped__")
    in_library = defined_in(function).partition(".")[0] == library.name
    return "original" if in_library else "foreign"


def defined_in(function: Any) -> str:
    """The module in which a function was defined; "" for what is no function, a proxy too."""
    if type(function) is not FunctionType:
        return ""
    return str(function.__globals__.get("__name__", ""))


def calls_ours(function: Any, library: Library, deepest: int = 8) -> bool:
    """Whether it is ours, or wraps ours: a bound method, a partial, ``functools.wraps``, a closure.

    accelerate's hooks keep the bound ``forward`` of before. If that was ours, ours runs.
    """
    if author_of(function, library) == "ours":
        return True
    parts = _parts(function) if deepest else []
    return any(calls_ours(part, library, deepest - 1) for part in parts)


def _parts(function: Any) -> list[Any]:
    """What a wrapper may call, as far as it shows."""
    parts = [getattr(function, "__wrapped__", None)]
    if isinstance(function, functools.partial):
        parts.append(function.func)
    if type(function) is MethodType:
        parts.append(function.__func__)
    if type(function) is FunctionType:
        parts += function.__defaults__ or ()
        parts += (function.__kwdefaults__ or {}).values()
        for cell in function.__closure__ or ():
            try:
                parts.append(cell.cell_contents)
            except ValueError:  # a name that has no value yet
                pass
    return [part for part in parts if callable(part)]


def modules_with_foreign_methods(library: Library) -> list[nn.Module]:
    """Of all modules that this process holds, those with a method that stays in force, not ours."""
    modules: list[nn.Module] = []
    for module in _instances_of(users_in(library, [])):
        if foreign_methods(library, [module]):
            modules.append(module)
    return modules


def modules_in(library: Library, model: nn.Module) -> list[nn.Module]:
    """A model's modules that have methods of the library's that we replace."""
    owners = [target.owner for target in targets(library)]
    modules = []
    for part in model.modules():
        if any(_has_methods_of(part, owner) for owner in owners):
            modules.append(part)
    return modules


def not_served(library: Library, model: nn.Module | None) -> list[str]:
    """What nobody may take for something that is replaced, in sentences.

    It is looked for in a model or, without one, in all that this process holds.
    """
    sentences = []
    for path, words in library.not_served.items():
        owner = owner_of(path)
        if owner is None:
            continue
        if model is None:
            gc.collect()  # a module may refer to itself, and be there though nobody holds it
            parts = _instances_of(with_derived(owner))
        else:
            parts = list(model.modules())
        if any(isinstance(part, owner) for part in parts):
            sentences.append(
                f"nothing of {owner.__name__} ({words}) is resampled by what is patched: it stays "
                "with the library's own code under every mode"
            )
    return sentences


def _instances_of(classes: Collection[Any]) -> list[Any]:
    """All objects of these classes that this process holds.

    Python's garbage collector finds them, in 0.04 s where there are half a million objects: an
    object refers to its class.
    """
    instances = []
    for each in gc.get_referrers(*classes):
        if type(each) in classes:
            instances.append(each)
    return instances


def with_derived(owner: Any) -> list[Any]:
    """A class and all that are derived from it, or a module of Python."""
    classes = [owner]
    if isinstance(owner, type):
        for derived in list[type](owner.__subclasses__()):
            classes += with_derived(derived)
    return classes


def look_up(user: Any, name: str) -> tuple[Any, Any]:
    """The object, class or module from which ``user`` has this method, and the method.

    (None, None) if it has none.
    """
    owners = user.__mro__ if isinstance(user, type) else (user, *type(user).__mro__)
    for owner in owners:
        if name in vars(owner):
            return owner, vars(owner)[name]
    return None, None


def users_in(library: Library, modules: Collection[nn.Module]) -> list[Any]:
    """A model's modules; without any, all that have a method of the library's that we replace."""
    users: list[Any] = list(modules)
    if not users:
        for target in targets(library):
            users += with_derived(target.owner)
    return users


def in_force(library: Library, target: Target, user: Any) -> bool:
    """Whether ours runs where ``user`` has this method called."""
    if not _has_methods_of(user, target.owner) or target.key not in in_place:
        return False
    owner, function = look_up(user, target.name)
    if _hides_ours(library, target, owner, function):
        return False
    # What another has put over ours may call it, as a wrapper does: that counts as ours.
    return author_of(function, library) != "original"


def foreign_methods(library: Library, users: Iterable[Any]) -> list[str]:
    """What stays in force where ours should be, in sentences.

    Args:
        library: whose methods ours take the place of.
        users: classes, modules of Python and modules of models that have these methods.

    Not named is what another has put over ours, and a subclass's method that calls the one it
    hides.
    """
    sentences: dict[str, bool] = {}  # in order
    for user in users:
        for target in targets(library):
            if _has_methods_of(user, target.owner):
                owner, function = look_up(user, target.name)
                if _hides_ours(library, target, owner, function):
                    sentences[_sentence(target.name, owner, function)] = True
    return list(sentences)


def _has_methods_of(user: Any, owner: Any) -> bool:
    if not isinstance(owner, type):
        return user is owner
    return issubclass(user, owner) if isinstance(user, type) else isinstance(user, owner)


def _hides_ours(library: Library, target: Target, owner: Any, function: Any) -> bool:
    """Whether this method, which ``owner`` has, is in force in place of ours."""
    if owner is target.owner:
        # Where ours was put before, another's lies over it, and may call it.
        return author_of(function, library) == "foreign" and target.key not in in_place
    if owner is None or calls_ours(function, library):
        return False
    # A method of a subclass that names the one it hides calls it, as by super().
    code = getattr(function, "__code__", None)
    return target.name not in getattr(code, "co_names", ())


def _sentence(name: str, owner: Any, function: Any) -> str:
    where = getattr(owner, "__name__", None) or f"one {type(owner).__name__}"
    kind = type(function)
    home = defined_in(function) or kind.__module__
    by = getattr(function, "__qualname__", kind.__name__)
    return f"{where}.{name} is {home}.{by}"


def overridden_by(library: Library, module: Any, skips: tuple[str, ...]) -> str | None:
    """What another has changed of what the library's code calls and ours does not, in words.

    None: nothing. So a subclass, a patch and a hook keep their effect, except in a graph of
    ``torch.compile``, which cannot ask.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    for path in skips:
        # "rope.get_embed" is a method of the module's ``rope``, "get_embed" one of its own.
        attribute, _, name = path.rpartition(".")
        holder = getattr(module, attribute, None) if attribute else module
        if holder is not None and _is_changed(library, holder, name):
            return f"{type(holder).__name__}.{name} (not the library's own)"
    return None


def _is_changed(library: Library, holder: Any, name: str) -> bool:
    """Whether to call this function of the holder does something else than in the library."""
    # ``forward`` is called by calling the module, whatever ``forward`` it has.
    if name == "forward" and _is_hooked(holder):
        return True
    function = getattr(holder, "__dict__", {}).get(name, getattr(type(holder), name, None))
    if function is None:
        return False
    # A method that was taken from another module has that one's settings.
    bound_elsewhere = getattr(function, "__self__", holder) is not holder
    return bound_elsewhere or author_of(function, library) == "foreign"


def _is_hooked(module: Any) -> bool:
    for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        if getattr(module, kind, None) or getattr(nn.modules.module, f"_global{kind}"):
            return True
    return False
