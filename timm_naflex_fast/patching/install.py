"""Puts our functions on a library's classes and takes them off again. No other file does.

Each ``enable()`` is a ``Choice``, which is added to the choices of a model's modules, or of its
libraries. While a choice for a library has not ended, ours is in place there, and asks at each call
what holds (``decide.settings_for``). So nothing is put on or taken off when one choice hides
another.

Everything is imported before the lock is taken: a thread that imports a library may be about to
call ``enable()``.
"""

import gc
import importlib
import sys
import weakref
from collections.abc import Iterable
from weakref import WeakSet

from torch import nn

from ..resampling import kept
from .choices import (
    CHOICES_ATTRIBUTE,
    STOCK,
    Choice,
    Choices,
    Counts,
    Mode,
    check_name,
    every_choices,
    lock,
    parse_settings,
)
from .counts import call_counts, warn
from .decide import settings_for
from .graphs import forget_graphs
from .library import Library, in_place, original, originals, owners, places
from .not_served import not_served
from .others import author_of, classes_of, in_force, instances_of, modules_in
from .releases import check_supported

# Each has a file here, "timm_methods", with its ``LIBRARY``. A model that we speed up contains one of
# these classes.
LIBRARIES = {
    "timm": "NaFlexEmbeds",
    "transformers": "Siglip2VisionEmbeddings, Cosmos3EdgeVisionEmbeddings, RadioPatchEmbeddings, "
    "HunYuanVLVisionPatchEmbed",
}

known_choices: list[Choice] = []  # all that can still hold, oldest first
# Those that were there when ours was put on, or were given choices of their own.
known_modules: WeakSet[nn.Module] = WeakSet()
known_libraries: dict[str, Library] = {}  # by name, those that were enabled or looked at


def _import_library(name: str, *, all_parts: bool) -> Library:
    """What our file about a library says. Not to be called while the lock is held.

    Args:
        name: of the library.
        all_parts: import all of the library that we replace, too.

    Raises:
        RuntimeError: the library cannot be imported, or lacks a part.
    """
    try:
        # First: another thread that imports it may be waiting for our file about it.
        importlib.import_module(name)
        library: Library = importlib.import_module(f"{__package__}.{name}_methods").LIBRARY
        if all_parts:
            for path, _ in library.replacements:
                module, _, cls = path.partition(":")
                getattr(importlib.import_module(module), cls or "__name__")
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"{name} cannot be imported, or lacks what timm_naflex_fast replaces: {error}"
        ) from error
    return known_libraries.setdefault(name, library)


def imported_libraries() -> list[Library]:
    """Those that this process has imported. Not to be called while the lock is held."""
    imported = []
    for name in LIBRARIES:
        if sys.modules.get(name):
            imported.append(_import_library(name, all_parts=False))
    return imported


def _say_what_stays(library: Library, modules: list[nn.Module], *, strict: bool) -> None:
    """Warn of what other packages have changed or saved before, in one model or everywhere.

    Raises:
        RuntimeError: there is such a thing, and ``strict`` forbids it.
    """
    if modules:
        _, sentences = in_force(library, modules)
    else:
        classes = classes_of(library)
        if strict:
            gc.collect()  # a module with hooks refers to itself, and may be there unused
        # All objects are searched for the first choice for every model, and not again while one
        # holds.
        if settings_for(None, library) == STOCK:
            known_modules.update(instances_of(classes))
        if strict:
            # Not a derived class that nobody uses.
            classes = list(owners(library).values())
        # The modules in no variable: a traceback would keep them alive.
        _, sentences = in_force(library, [*classes, *known_modules])
    for sentence in sentences:
        message = f"{sentence} and stays in force; to put it over ours, call enable() before"
        if strict:
            raise RuntimeError(f"{message}. Nothing was changed")
        warn(message)


def _put_on(library: Library) -> bool:
    """Put ours where the library's own functions are. Whether there was any."""
    replaced = False
    for owner, key in places(library):
        method = vars(owner)[key[1]]
        if author_of(method, library) == "original":
            ours = library.replacements[key].function
            # Ours gets the method's name: a pickle of it can be read without this package.
            for attribute in ("__module__", "__name__", "__qualname__"):
                setattr(ours, attribute, getattr(method, attribute))
            originals[key] = method
            in_place.add(key)
            setattr(owner, key[1], ours)
            replaced = True
    return replaced


def _take_off(library: Library) -> None:
    """Put the library's own functions back, where ours is not under another package's."""
    covered = set()
    for owner, key in places(library):
        author = author_of(vars(owner).get(key[1]), library)
        if author == "ours":
            setattr(owner, key[1], original(key))
        elif author == "foreign":
            covered.add(key)  # it may still call ours
    in_place.difference_update(library.replacements.keys() - covered)


def modules_of(model: nn.Module) -> tuple[list[nn.Module], list[Library]]:
    """The modules in ``model`` whose methods are replaced, and the libraries that they are of.

    Raises:
        ValueError: not a module, or nothing of any library inside.
    """
    modules: list[nn.Module] = []
    libraries: list[Library] = []
    names = " and ".join(f"no {name} {classes}" for name, classes in LIBRARIES.items())
    sentences = [f"{type(model).__name__} contains {names}"]
    if isinstance(model, nn.Module):
        # Of a library that is not imported there is no module in the model.
        for library in imported_libraries():
            inside = modules_in(library, model)
            if inside:
                modules += inside
                libraries.append(library)
    if not modules:
        if isinstance(model, nn.Module):
            sentences += not_served(imported_libraries(), model)
        sentences.append("valid is any torch.nn.Module that contains one of them")
        raise ValueError("; ".join(sentences))
    return modules, libraries


def _begin(choice: Choice, modules: Iterable[nn.Module]) -> None:
    """Let a choice hold: for these modules or, without any, for every model of its libraries."""
    known_choices.append(choice)
    if not choice.model_class:
        for library in choice.libraries:
            library.choices.add(choice)
    for module in modules:
        # None in a module that was unpickled.
        own = vars(module).get(CHOICES_ATTRIBUTE) or Choices()
        own.add(choice)
        vars(module)[CHOICES_ATTRIBUTE] = own
        known_modules.add(module)
    tidy()


def _end(choices: Iterable[Choice]) -> None:
    """Let the newest of what is left hold."""
    # Every module and library looks anew what holds: each sees the old settings or the new.
    for choice in choices:
        choice.ended = True
    for where in list(every_choices):
        where.update()
    # A module without choices is left as it was before the first.
    for module in list(known_modules):
        own = vars(module).get(CHOICES_ATTRIBUTE)
        if own is not None and own.settings is None:
            del vars(module)[CHOICES_ATTRIBUTE]
    tidy()


def tidy() -> None:
    """Forget choices that hold nowhere any more, and take ours off where no choice needs it."""
    # A choice for a model is alive as long as the model is, or a copy that was made of it.
    alive = set()
    for where in list(every_choices):
        alive.update(where.choices)
    known_choices[:] = [choice for choice in known_choices if choice in alive]

    # What runs is counted for the newest.
    newest = known_choices[-1].counts if known_choices else Counts()
    call_counts.calls = newest.calls
    call_counts.fallbacks = newest.fallbacks

    needed: set[Library] = set()
    for choice in known_choices:
        if choice.settings != STOCK:
            needed.update(choice.libraries)
    for library in known_libraries.values():
        if library not in needed:
            _take_off(library)


class Handle:
    """What :func:`enable` returns: as a context manager, or by ``restore()``, it ends that call.

    The newest of what else was chosen, before it or meanwhile, holds then. Handles may be left in
    any order. What was chosen by a call whose handle nobody holds is ended by ``disable()``, or
    forgotten when a newer such call for the same models hides it.
    """

    def __init__(self, choice: Choice) -> None:
        self.flags = choice.settings
        self._choice = choice
        choice.handle = weakref.ref(self)

    def restore(self) -> None:
        """End it, and its counts of ``status()``; a second call does nothing."""
        with lock:
            _end([self._choice])
        forget_graphs(replaced=False)

    def __enter__(self) -> "Handle":
        if self._choice.ended:
            raise RuntimeError("what this handle stands for has ended; call enable() again")
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore()


def enable(
    mode: Mode = "matmul",
    *,
    model: nn.Module | None = None,
    pos_embed: Mode | None = None,
    patch_embed: str | None = None,
    rope: str | None = None,
    library: str | tuple[str, ...] = "timm",
    strict: bool = False,
) -> Handle:
    """Replace a library's resampling, for every model (made before or after) or for one.

    ``status()`` counts anew. The newest call holds, until its handle is left or ``disable()`` ends
    all. A method that another package has changed or wrapped before, on a class or on one module
    (as accelerate's hooks do), is left as it is, with a warning.

    Args:
        mode: "matmul" (timm's result to float32 rounding, fastest), "interpolate_cached" (timm's
            own bits in the forward pass on a CPU), "grid_sample" (another result: only for weights
            trained with timm's pos_embed_use_grid_sample; timm only), or "stock" (the library's own
            code: exempts a ``model``). "-" works like "_"; "matmul-resample" is "matmul".
        model: replace in this module only: one that contains timm's NaFlexEmbeds, or transformers'
            Siglip2VisionEmbeddings, Cosmos3EdgeVisionEmbeddings, RadioPatchEmbeddings or
            HunYuanVLVisionPatchEmbed. Beats the mode for every model. Copies of it share its
            settings.
        pos_embed: overrides ``mode`` for the position embeddings; the same names.
        patch_embed: overrides ``mode`` for timm's patch kernels: "matmul" or "stock".
        rope: overrides ``mode`` for timm's rotary embeddings: "batched" or "stock".
        library: "timm", "transformers", or a tuple of both; without effect for one model, which is
            looked through for both.
        strict: raise a RuntimeError where the library's own code had to run in place of what was
            chosen; and at once if ``model`` also resizes a position table by code in which nothing
            is replaced.

    Returns:
        A handle; leaving it as a context manager ends what this call has chosen, and nothing else.

    Raises:
        ValueError: an unknown name, or a model with nothing to replace; nothing is changed.
        RuntimeError: a library that is missing, too old, or whose methods differ; with ``strict``,
            a method that would be left as it is, or a table that would; nothing is changed.

    >>> with enable():
    ...     print(status().flags)
    Settings(pos_embed='matmul', patch_embed='matmul', rope='batched')
    """
    if isinstance(mode, nn.Module):
        raise ValueError(
            "the first argument of enable is a mode; give a model by name: enable(model=...)"
        )
    settings = parse_settings(
        mode, strict=strict, pos_embed=pos_embed, patch_embed=patch_embed, rope=rope
    )
    names = (library,) if isinstance(library, str) else library
    for name in names:
        check_name("library", name, tuple(LIBRARIES))
    modules: list[nn.Module] = []
    if model is None:
        libraries = [_import_library(name, all_parts=True) for name in names]
    else:
        modules, libraries = modules_of(model)
    for each in libraries:
        check_name(f"the position embeddings of {each.name}", settings.pos_embed, each.modes)
    if strict and model is not None and settings.pos_embed != "stock":
        for sentence in not_served(libraries, model):
            raise RuntimeError(f"{sentence}. Nothing was changed")

    model_class = "" if model is None else type(model).__name__
    choice = Choice(settings, model_class, tuple(libraries))
    handle = Handle(choice)
    replaced = []
    with lock:
        if settings != STOCK:
            # All is checked before the first is replaced.
            for each in libraries:
                check_supported(each)
                _say_what_stays(each, modules, strict=strict)
            replaced = [_put_on(each) for each in libraries]
        _begin(choice, modules)
    forget_graphs(replaced=any(replaced))
    return handle


def disable(model: nn.Module | None = None) -> None:
    """Put every library back exactly as it was, and end all choices; or make one ``model`` stock.

    ``disable()`` also frees kept tables and kernels, and the counts of ``status()`` start anew.
    While settings for every model hold, disabling a model exempts it until ``disable()``; otherwise
    its own settings are dropped.

    Raises:
        ValueError: ``model`` contains nothing that is replaced.

    >>> handle = enable("interpolate_cached")
    >>> disable()
    >>> status().replaced
    {}
    """
    if model is None:
        with lock:
            kept.clear_all()
            _end(known_choices)
        forget_graphs(replaced=False)
        return
    modules, libraries = modules_of(model)
    with lock:
        if any(settings_for(None, library) != STOCK for library in libraries):
            counts = known_choices[-1].counts  # what was counted goes on
            _begin(Choice(STOCK, type(model).__name__, counts=counts), modules)
        else:
            for module in modules:
                vars(module).pop(CHOICES_ATTRIBUTE, None)
            tidy()
    forget_graphs(replaced=False)
