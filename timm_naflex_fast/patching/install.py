"""Puts our functions on a library's classes and takes them off again. No other file changes a
library's classes.

Each ``enable()`` adds an ``Override`` to one list; its handle, or ``disable()``, takes it out.
``_refresh`` then works out what holds: our functions are in place before settings take effect, and
are removed after the last have ended, so another thread sees the old settings or the new, never a
mixture.

Everything is imported before the lock is taken: a thread that imports a library may be about to
call ``enable()``.
"""

import importlib
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from weakref import WeakSet

from torch import nn

from ..resampling import kept
from .choices import (
    SETTINGS_ATTRIBUTE,
    STOCK,
    Counts,
    Mode,
    ModelSettings,
    Override,
    check_name,
    parse_settings,
)
from .library import (
    Library,
    author_of,
    call_counts,
    imported_targets,
    original,
    originals,
    saved,
    targets,
    warn_once,
)
from .releases import check_supported, foreign_methods, unsupported
from .status import Status, describe

__all__ = ["LIBRARIES", "Handle", "Status", "disable", "enable", "original", "status"]

WITH_MODELS = ("timm", "transformers")
LIBRARIES = (*WITH_MODELS, "torchtitan")  # each has a file here of its name, with its ``LIBRARY``

_lock = threading.RLock()
kept.hold_over_fork(_lock)  # after the cache's lock, which is taken while this one is held

_overrides: list[Override] = []  # all that have not ended, oldest first
_model_settings: WeakSet[ModelSettings] = (
    WeakSet()
)  # of all models; each lives as long as its model or a copy
_libraries: dict[str, Library] = {}  # by name, those that were enabled or looked at


def _import_library(name: str) -> Library:
    """What our file about a library says. Not to be called while the lock is held.

    Raises:
        RuntimeError: the library cannot be imported, or lacks what that file imports.
    """
    try:
        importlib.import_module(
            name
        )  # first: another thread that imports it may be waiting for our file about it
        return importlib.import_module(f"{__package__}.{name}").LIBRARY
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"{name} cannot be imported, or lacks what timm_naflex_fast replaces: {error}"
        ) from error


def _import_whole_library(name: str) -> Library:
    """The same, and all of the library that we replace is imported.

    Raises:
        RuntimeError: it cannot be imported, or lacks a part.
    """
    library, problem = _import_library(name), None
    for path, _ in library.replacements:
        module, cls = path.split(":")
        try:
            getattr(importlib.import_module(module), cls or "__name__")
        except (ImportError, AttributeError) as error:
            problem = unsupported(library, str(error))
            # A part that needs a package that is not installed cannot be in use.
            if not isinstance(error, ModuleNotFoundError) or f"{error.name}.".startswith(
                f"{name}."
            ):
                raise problem from error
    if problem is not None and not any(targets(library)):
        raise problem
    return _libraries.setdefault(name, library)


def _install(libraries: Iterable[Library]) -> None:
    """Put ours where the libraries' own functions are. All are checked before the first is
    replaced."""
    todo = []
    for library in libraries:
        now = [(target, vars(target[0]).get(target[1])) for target in imported_targets(library)]
        ready = [
            target
            for target, method in now
            if method is None or author_of(method, library) == "original"
        ]
        check_supported(library, ready)
        todo += [(library, target) for target in ready]
    for library, (owner, name, key) in todo:
        originals[key] = saved[key] = vars(owner)[name]
        setattr(owner, name, library.replacements[key].function)


def _uninstall(library: Library) -> None:
    removed = []
    for owner, name, key in imported_targets(library):
        author = author_of(vars(owner).get(name), library)
        if author == "ours":
            setattr(owner, name, original(key))
        if author != "foreign":  # else another's wrapper may still call ours
            removed.append(key)
    for key in removed:
        originals.pop(key, None)


def _modules_of(
    model: nn.Module, names: Iterable[str] = ()
) -> tuple[list[nn.Module], list[Library]]:
    """The modules in ``model`` whose methods are replaced, and their libraries: those of ``names``,
    else any.

    Raises:
        ValueError: not a module, or nothing of any library inside.
    """
    # A library that is not imported has no module in the model; to import our file about it would
    # import it.
    libraries = [
        _import_library(name) for name in names or WITH_MODELS if names or sys.modules.get(name)
    ]
    if not libraries or not all(library.model_classes for library in libraries):
        raise ValueError(
            f"a model is one of {' or '.join(WITH_MODELS)}, imported before; torchtitan knows no model"
        )
    wanted = " or ".join(
        f"{library.name} {', '.join(library.model_classes)}" for library in libraries
    )
    modules, inside_of = list[nn.Module](), list[Library]()
    for library in libraries if isinstance(model, nn.Module) else ():
        owners = tuple(owner for owner, _, _ in targets(library) if isinstance(owner, type))
        if inside := [module for module in model.modules() if isinstance(module, owners)]:
            modules += inside
            inside_of.append(_libraries.setdefault(library.name, library))
    if not inside_of:
        raise ValueError(
            f"{type(model).__name__} contains no {wanted.replace(' or ', ' and no ')}; valid is any torch.nn.Module "
            f"that does, such as {' or '.join(library.example for library in libraries)}, or a wrapper around one"
        )
    return modules, inside_of


def _activate(override: Override, modules: list[nn.Module]) -> None:
    """Put an override in force: for these modules, or, without any, for every model."""
    new: dict[ModelSettings | None, ModelSettings] = {}
    for module in modules:
        old = vars(module).get(SETTINGS_ATTRIBUTE)
        if old not in new:  # with the settings of before, until all modules have it
            before = () if old is None else tuple(o for o in old.overrides if o in _overrides)
            new[old] = ModelSettings((*before, override), None if old is None else old.settings)
        new[old].modules.add(module)
        vars(module)[SETTINGS_ATTRIBUTE] = new[old]
    _model_settings.update(new.values())
    _overrides.append(override)
    _refresh()


def _newest(overrides: Iterable[Override]) -> Override | None:
    return next((override for override in reversed([*overrides]) if override in _overrides), None)


def _refresh(*, install: bool = True) -> None:
    """Work out what holds, from the list of overrides, and put our functions on the libraries that
    need them."""
    by_model = {of_model: _newest(of_model.overrides) for of_model in list(_model_settings)}
    _overrides[:] = [
        o
        for o in _overrides
        if not o.model or any(o in of_model.overrides for of_model in by_model)
    ]
    for_all = [override for override in _overrides if not override.model]
    by_library = {
        lib: _newest(o for o in for_all if lib in o.libraries) for lib in _libraries.values()
    }
    active = [
        o
        for o in (*by_model.values(), *by_library.values())
        if o is not None and o.settings != STOCK
    ]
    used = [
        library
        for library in by_library
        if any(library in override.libraries for override in active)
    ]
    if install:
        _install(used)
    for library, newest in by_library.items():
        library.settings = STOCK if newest is None else newest.settings
    for of_model, newest in by_model.items():
        of_model.settings = None if newest is None else newest.settings
        for module in list(of_model.modules) if newest is None else ():
            if vars(module).get(SETTINGS_ATTRIBUTE) is of_model:
                del vars(module)[SETTINGS_ATTRIBUTE]
    now = _overrides[-1].counts if _overrides else Counts()
    call_counts.calls, call_counts.fallbacks = now.calls, now.fallbacks
    for library in by_library:
        if library not in used:
            _uninstall(library)


class Handle:
    """What :func:`enable` returns. As a context manager, or by ``restore()``, it ends what that
    call has chosen.

    The newest of what else was chosen, before it or meanwhile, holds then. Handles may be left in
    any order.
    """

    def __init__(self, override: Override) -> None:
        self.flags, self._override = override.settings, override

    def restore(self) -> None:
        """End it, and its counts of ``status()``; a second call does nothing."""
        with _lock:
            if self._override in _overrides:
                _overrides.remove(self._override)
                _refresh()

    def __enter__(self) -> "Handle":
        if self._override not in _overrides:
            raise RuntimeError("what this handle stands for has ended; call enable() again")
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore()


def enable(
    mode: Mode = "matmul",
    *,
    model: nn.Module | None = None,
    pos_embed: str | None = None,
    patch_embed: str | None = None,
    rope: str | None = None,
    library: str | tuple[str, ...] | None = None,
    strict: bool = False,
) -> Handle:
    """Replace a library's resampling, for every model (made before or after) or for one.
    ``status()`` counts anew.

    The newest call holds, until its handle is left or ``disable()`` ends all. A method that another
    package has changed before is left as it is, with a warning.

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
        library: "timm" (default), "transformers", "torchtitan", or a tuple. With ``model``:
            whichever it is of.
        strict: raise a RuntimeError where the library's own code had to run in place of what was
            chosen.

    Returns:
        A handle; leaving it as a context manager ends what this call has chosen, and nothing else.

    Raises:
        ValueError: an unknown name, or a model with nothing to replace; nothing is changed.
        RuntimeError: a library that is missing, too old, or whose methods differ; with ``strict``,
            a method that would be left as it is; nothing is changed.

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
    wanted: Iterable[object] = (
        library if isinstance(library, tuple | list) and library else (library,)
    )
    names = [] if library is None else [check_name("library", name, LIBRARIES) for name in wanted]
    modules: list[nn.Module] = []
    if model is None:
        libraries = [_import_whole_library(name) for name in names or ["timm"]]
    else:
        modules, libraries = _modules_of(model, names)
    for lib in libraries:
        modes = [
            mode
            for r in lib.replacements.values()
            if r.component == "pos_embed"
            for mode in r.strategies
        ]
        argument = f"mode with {lib.name}" if pos_embed is None else "pos_embed"
        check_name(argument, settings.pos_embed, ["stock", *dict.fromkeys(modes)])
    override = Override(settings, "" if model is None else type(model).__name__, tuple(libraries))
    with _lock:
        if settings != STOCK:
            for sentence in chain.from_iterable(
                foreign_methods(o, modules, subclasses=not strict) for o in libraries
            ):
                message = (
                    f"{sentence} and stays in force; to put it over ours, call enable() before"
                )
                if strict:
                    raise RuntimeError(f"{message}. Nothing was changed")
                warn_once(message, 3)
            _install(libraries)
        _activate(override, modules)
    return Handle(override)


def disable(model: nn.Module | None = None) -> None:
    """Put every library back exactly as it was, and end all settings, those of models too; or make
    one ``model`` stock.

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
    modules, libraries = ([], []) if model is None else _modules_of(model)
    with _lock:
        if model is None:
            _overrides.clear()
            kept.clear_all()
        elif not all(library.settings == STOCK for library in libraries):
            # What was counted goes on.
            return _activate(
                Override(STOCK, type(model).__name__, counts=replace(call_counts)), modules
            )
        for module in modules:
            vars(module).pop(SETTINGS_ATTRIBUTE, None)
        _refresh()


def status(model: nn.Module | None = None) -> Status:
    """What is replaced by what at present, for every model or for one, and what has run since.

    Raises:
        ValueError: ``model`` contains nothing that is replaced.

    >>> status().calls
    {}
    """
    modules, libraries = ([], list(_libraries.values())) if model is None else _modules_of(model)
    with _lock:
        _refresh(install=False)
        newest = [] if modules else [_newest(of_model.overrides) for of_model in _model_settings]
        models = [
            override for override in _overrides if override in newest
        ]  # not what a newer one hides everywhere
        return describe(
            libraries,
            modules,
            models,
            "every model" if model is None else f"this {type(model).__name__}",
        )
