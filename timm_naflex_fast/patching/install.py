"""Puts our functions on a library's classes and takes them off again. No other file changes a library's classes.

Each ``enable()`` is one ``Enabled``; the newest that is in force holds. Our functions are in place before settings take
effect and are removed after the last have ended: another thread sees the old settings or the new, never a mixture.
Before we replace a method we enter it in ``originals``, so Ctrl-C loses nothing at any moment.

Everything is imported before the lock is taken: a thread that imports a library may be about to call ``enable()``.
"""

from __future__ import annotations

import importlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ..resampling import cache
from .compat import Slot, check, describe_foreign, slot_of, unsupported, version_of
from .library import Library, count_into, counts, functions, homes, original, originals, originals_of, places, warn_once
from .settings import ATTRIBUTE, STOCK, Enabled, Mode, Settings, check_name, may_hold, own_settings, parse_settings
from .status import Status

__all__ = ["LIBRARIES", "Handle", "Status", "disable", "enable", "original", "status"]

LIBRARIES = ("timm", "transformers", "torchtitan")  # each has a file here of its name, with its ``LIBRARY``

_lock = threading.RLock()
cache.hold_over_fork(_lock)  # after the cache's lock, which is taken while this one is held

# In the order of their making. Only libraries and the modules of models keep them alive.
_enabled: list[weakref.ref[Enabled]] = []
_holders: dict[int, weakref.ref[Any]] = {}  # by id: the libraries and modules that refer to one, but for copies


def _entry(name: str) -> Library:
    """What our file about a library says.

    Raises:
        RuntimeError: the library lacks what that file imports.
    """
    try:
        return importlib.import_module(f"{__package__}.{name}").LIBRARY
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"{name} lacks what timm_naflex_fast replaces: {error}") from error


def _library(name: str) -> Library:
    """A library that has to be there, all of it that we replace imported. Not to be called while the lock is held.

    Raises:
        RuntimeError: it cannot be imported, lacks what we replace, or is too old.
    """
    try:
        importlib.import_module(name)  # first: another thread that imports it may be waiting for our file about it
    except ImportError as error:
        raise RuntimeError(f"{name} cannot be imported: {error}") from error
    library = _entry(name)
    version_of(library)
    missing = []
    for home, _ in library.replacements:
        module, _, cls = home.partition(":")
        try:
            getattr(importlib.import_module(module), cls or "__name__")
        except (ImportError, AttributeError) as error:
            needs = error.name if isinstance(error, ModuleNotFoundError) else None
            if needs is None or needs.partition(".")[0] == name:
                raise unsupported(library, str(error)) from error
            missing.append(error)  # a part that needs a package that is not installed cannot be in use
    if len(missing) == len(library.replacements):
        raise unsupported(library, str(missing[0])) from missing[0]
    return library


def _in_use() -> list[Library]:
    """The libraries that were enabled, or looked at, in this process."""
    files = [sys.modules.get(f"{__package__}.{name}") for name in LIBRARIES]
    return [file.LIBRARY for file in files if file is not None and hasattr(file, "LIBRARY")]  # else half imported


def _install(library: Library) -> None:
    todo = []
    for owner, name, replacement in places(library):
        slot = slot_of(owner, name, library)
        if slot in (Slot.ORIGINAL, Slot.EMPTY):
            todo.append((owner, name, replacement))
        elif slot is Slot.FOREIGN and (owner, name) not in originals_of(owner):
            warn_once(
                f"{describe_foreign(owner, name)} and stays in force; to put it over ours, call enable() before", 5
            )
    check(library, todo)
    for owner, name, replacement in todo:
        originals_of(owner)[owner, name] = owner.__dict__[name]
        setattr(owner, name, replacement.function)


def _uninstall(library: Library) -> None:
    for owner, name, _ in places(library) if originals or functions else ():
        if slot_of(owner, name, library) is Slot.OURS and (owner, name) not in originals_of(owner):
            # A module that imported the function from where ours was.
            functions[owner, name] = next(theirs for (_, known), theirs in functions.items() if known == name)
    for (owner, name), theirs in [*originals.items(), *functions.items()]:  # those of reloaded modules too
        if (owner.__module__ if isinstance(owner, type) else owner.__name__).partition(".")[0] == library.name:
            slot = slot_of(owner, name, library)
            if slot is Slot.OURS:
                setattr(owner, name, theirs)
            if slot in (Slot.OURS, Slot.ORIGINAL):  # else another's wrapper may still call ours
                del originals_of(owner)[owner, name]


def _targets(model: nn.Module, names: Iterable[str] = ()) -> tuple[list[nn.Module], list[Library]]:
    """The modules in ``model`` whose methods are replaced, and their libraries: those of ``names``, else any.

    Raises:
        ValueError: not a module, or nothing of any library inside.
    """
    # A library that nobody has imported has no part in a model; ours about it would import it.
    known = [_library(name) for name in names] or [_entry(name) for name in LIBRARIES if name in sys.modules]
    for library in known if names else ():
        if not library.roots:
            raise ValueError(f"what is replaced in {library.name} knows no model: enable(library={library.name!r})")
    known = [library for library in known if library.roots]
    wanted = " or ".join(f"{library.name} {', '.join(library.roots)}" for library in known) or " or ".join(LIBRARIES)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module that contains {wanted}; got {type(model).__name__}")
    targets: dict[Library, list[nn.Module]] = {}
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    for library in known:
        modules = {home.partition(":")[0] for home, _ in library.replacements}
        if any(cls.__name__ in library.roots and cls.__module__ in modules for cls in classes):
            _library(library.name)
            owners = tuple(owner for owner, _, _ in homes(library) if isinstance(owner, type))
            if inside := [module for module in model.modules() if isinstance(module, owners)]:
                targets[library] = inside
    if not targets:
        raise ValueError(
            f"{type(model).__name__} contains no {wanted.replace(' or ', ' and no ')}; valid is any module that does, "
            f"such as {' or '.join(library.example for library in known)}, or a wrapper around one"
        )
    return [module for inside in targets.values() for module in inside], list(targets)


def _enter(enabled: Enabled, settings: Settings, modules: list[nn.Module], libraries: list[Library]) -> None:
    """Put settings in force: for these modules, or, without any, for every model."""
    if not settings.is_stock:
        for library in libraries:
            _install(library)
    _enabled.append(weakref.ref(enabled))
    for holder in modules or libraries:
        _holders[id(holder)] = weakref.ref(holder)  # first: whatever refers to it can be found
        vars(holder)[ATTRIBUTE] = (enabled, *may_hold(vars(holder).get(ATTRIBUTE, ())))
    enabled.settings = settings  # from here on it holds, for all of them
    _settle()


def _settle() -> None:
    """Drop what has ended, for libraries and models; put ours where it is needed again, take it off where not."""
    for holder in _alive(_holders.values()):
        vars(holder)[ATTRIBUTE] = left = may_hold(vars(holder).get(ATTRIBUTE, ()))
        if not left:
            del vars(holder)[ATTRIBUTE], _holders[id(holder)]
    for key in [key for key, ref in _holders.items() if ref() is None]:
        del _holders[key]
    for library in _in_use():
        settings = own_settings(library) or STOCK
        if library.settings.is_stock and not settings.is_stock:
            _install(library)
        library.settings = settings
    alive = _in_force()
    _enabled[:] = map(weakref.ref, alive)
    count_into(alive[-1].counts if alive else None)
    for library in _in_use():
        of_models = [e.settings for e in alive if e.model and library.name in e.libraries]
        if all(settings is None or settings.is_stock for settings in (library.settings, *of_models)):
            _uninstall(library)


def _alive(refs: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [found for ref in refs if (found := ref()) is not None]


def _in_force() -> list[Enabled]:
    return [enabled for enabled in _alive(_enabled) if enabled.settings is not None]


class Handle:
    """What :func:`enable` returns. As a context manager, or by ``restore()``, it ends what that call has chosen.

    The newest of what else was chosen, before it or meanwhile, holds then. Handles may be left in any order.
    """

    def __init__(self, settings: Settings, enabled: Enabled) -> None:
        self.flags = settings
        self._enabled, self._left = weakref.ref(enabled), False
        enabled.handle = weakref.ref(self)

    def restore(self) -> None:
        """End it, and its counts of ``status()``; a second call does nothing."""
        with _lock:
            enabled = self._enabled()
            if enabled is not None:
                enabled.settings = None
            self._left = True
            _settle()  # always: an interrupted call can be repeated

    def __enter__(self) -> Handle:
        if self._left:
            raise RuntimeError("this handle has been left, and what it stands for has ended; call enable() again")
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
) -> Handle:
    """Replace a library's resampling, for every model (made before or after) or for one. ``status()`` counts anew.

    The newest call holds, until its handle is left or ``disable()`` ends all. A method that another package has changed
    before is left as it is, with a warning.

    Args:
        mode: "matmul" (timm's result to float32 rounding, fastest), "interpolate_cached" (timm's own bits in the
            forward pass on a CPU), "grid_sample" (another result: only for weights trained with timm's
            pos_embed_use_grid_sample; timm only), or "stock" (the library's own code: exempts a ``model``). "-" works
            like "_"; "matmul-resample" is "matmul".
        model: replace in this module only: one that contains timm's NaFlexEmbeds, or transformers'
            Siglip2VisionEmbeddings, Cosmos3EdgeVisionEmbeddings, RadioPatchEmbeddings or HunYuanVLVisionPatchEmbed.
            Beats the mode for every model. Copies of it share its settings.
        pos_embed: overrides ``mode`` for the position embeddings; the same names.
        patch_embed: overrides ``mode`` for timm's patch kernels: "matmul" or "stock".
        rope: overrides ``mode`` for timm's rotary embeddings: "batched" or "stock".
        library: "timm" (default), "transformers", "torchtitan", or a tuple. With ``model``: whichever it is of.

    Returns:
        A handle; leaving it as a context manager ends what this call has chosen, and nothing else.

    Raises:
        ValueError: an unknown name, or a model with nothing to replace; nothing is changed.
        RuntimeError: a library that is missing, too old, or whose methods differ; nothing is changed.

    >>> with enable():
    ...     print(status().flags)
    Settings(pos_embed='matmul', patch_embed='matmul', rope='batched')
    """
    if isinstance(mode, nn.Module):
        raise ValueError("the first argument of enable is a mode; give a model by name: enable(model=...)")
    settings = parse_settings(mode, pos_embed=pos_embed, patch_embed=patch_embed, rope=rope)
    wanted: Iterable[object] = library if isinstance(library, tuple | list) and library else (library,)
    names = [] if library is None else [check_name("library", name, LIBRARIES) for name in wanted]
    modules: list[nn.Module] = []
    if model is None:
        libraries = [_library(name) for name in names or ["timm"]]
    else:
        modules, libraries = _targets(model, names)
    for known in libraries:
        check_name(f"mode with {known.name}" if pos_embed is None else "pos_embed", settings.pos_embed, known.modes)
    enabled = _for(model, libraries)
    handle = Handle(settings, enabled)
    with _lock:
        _enter(enabled, settings, modules, libraries)
    return handle


def _for(model: nn.Module | None, libraries: list[Library]) -> Enabled:
    names = tuple(library.name for library in libraries)
    return Enabled(model="" if model is None else type(model).__name__, libraries=names)


def disable(model: nn.Module | None = None) -> None:
    """Put every library back exactly as it was, and end all settings, those of models too; or make one ``model`` stock.

    ``disable()`` also frees kept tables and kernels, and the counts of ``status()`` start anew. While settings for
    every model hold, disabling a model exempts it until ``disable()``; otherwise its own settings are dropped.

    Raises:
        ValueError: ``model`` contains nothing that is replaced.

    >>> handle = enable("interpolate_cached")
    >>> disable()
    >>> status().replaced
    {}
    """
    modules, libraries = ([], []) if model is None else _targets(model)
    with _lock:
        if model is None:
            for enabled in _in_force():
                enabled.settings = None
            cache.clear_all()
        elif not all(library.settings.is_stock for library in libraries):
            exempt = _for(model, libraries)
            exempt.counts = counts()  # which go on
            return _enter(exempt, STOCK, modules, libraries)
        for module in modules:
            module.__dict__.pop(ATTRIBUTE, None)
        _settle()


def status(model: nn.Module | None = None) -> Status:
    """What is replaced by what at present, for every model or for one, and what has run since.

    Raises:
        ValueError: ``model`` contains nothing that is replaced.

    >>> status().calls
    {}
    """
    modules, libraries = ([], _in_use()) if model is None else _targets(model)
    replaced: dict[str, str] = {}
    components: dict[tuple[str, str, str], list[str]] = {}
    notes: list[str] = []
    with _lock:
        _settle()
        own = next(filter(None, map(own_settings, modules)), None)
        for library in libraries:
            settings = own or library.settings
            for owner, name, replacement in homes(library):
                slot, mode = slot_of(owner, name, library), getattr(settings, replacement.component)
                if slot is Slot.OURS:
                    impl = replaced[f"{owner.__name__}.{name}"] = replacement.impls.get(mode, "stock")
                    components.setdefault((library.name, replacement.component, mode), []).append(impl)
                elif slot is Slot.FOREIGN:
                    notes.append(describe_foreign(owner, name))
            notes += [note for before, note in library.notes.items() if version_of(library) < before]
        # Not those that a newer enable() hides in every module that we know of.
        known = [vars(holder).get(ATTRIBUTE, ()) for holder in _alive(_holders.values())]
        hidden = {e for newest_first in known for e in newest_first[1:]} - {e for first in known for e in first[:1]}
        models = [] if modules else [e for e in _in_force() if e.model and e not in hidden]
        return Status(
            own or next((library.settings for library in libraries if not library.settings.is_stock), STOCK),
            tuple(enabled.settings or STOCK for enabled in models),
            replaced,
            getattr(sys.modules.get("timm"), "__version__", "(not imported)"),
            torch.__version__,
            dict(counts().calls),
            dict(counts().fallbacks),
            tuple(enabled.model for enabled in models),
            components,
            tuple(notes),
            "every model" if model is None else f"this {type(model).__name__}",
        )


def snapshot() -> Callable[[], None]:
    """Remember what is in force; what this returns brings back exactly that, with its handles."""
    with _lock:
        _settle()
        before = [(enabled, enabled.settings) for enabled in _in_force()]
        holders = [(holder, vars(holder).get(ATTRIBUTE, ())) for holder in _alive(_holders.values())]

    def put_back() -> None:
        with _lock:
            for library in _in_use():
                if any(library.name in enabled.libraries and settings != STOCK for enabled, settings in before):
                    _install(library)
            for enabled, settings in [*((new, None) for new in _in_force()), *before]:
                enabled.settings = settings
            _enabled[:] = [weakref.ref(enabled) for enabled, _ in before]
            for holder, newest_first in holders:
                _holders[id(holder)] = weakref.ref(holder)
                vars(holder)[ATTRIBUTE] = newest_first
            _settle()

    return put_back
