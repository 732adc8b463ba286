"""Puts our functions on a library's classes and takes them off again. No other file changes a library's classes.

Our functions are in place before a choice takes effect and are removed after it has ended: another thread sees the old
choice or the new one, never a mixture. Before we replace a method we enter it in ``originals``, so Ctrl-C loses nothing
at any moment.
"""

from __future__ import annotations

import importlib
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..resampling import cache
from . import library as lib
from .compat import Found, check, unsupported, version_of
from .library import Library, functions, kept_by, original, originals
from .settings import STOCK, Flags, Mode, check_name, choose_for, forget_models, models_flags, own_flags, parse_flags

__all__ = ["LIBRARIES", "Handle", "Status", "disable", "enable", "original", "status"]

LIBRARIES = ("timm", "transformers")  # each has a file here of its name, with a table ``LIBRARY``

_lock = threading.RLock()
cache.hold_over_fork(_lock)  # after the cache's lock, which is taken while this one is held


def _table_of(name: str, *, needed: bool) -> Library:
    """A library's table; if it is ``needed``, the library has to be installed and no older than those we know.

    Raises:
        RuntimeError: it cannot be imported, lacks a class that we know, or is too old.
    """
    try:
        if needed:
            importlib.import_module(name)
        library = importlib.import_module(f"{__package__}.{name}").LIBRARY
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"{name} cannot be imported, or lacks what timm_naflex_fast replaces: {error}") from error
    if needed:
        version_of(library)
    return library


def _in_use() -> list[Library]:
    """The tables of the libraries that were enabled, or looked at, in this process."""
    files = [sys.modules.get(f"{__package__}.{name}") for name in LIBRARIES]
    return [file.LIBRARY for file in files if file is not None]


def _owners(home: str, name: str) -> list[Any]:
    """Where a library keeps what "module:Class" or "module:" names: its own first, then others that are in use.

    ``importlib.reload`` leaves the class of before in use, in models and in modules that imported it; a function is
    also an attribute of the modules that imported it by name.
    """
    module_name, _, class_name = map(sys.intern, home.partition(":"))  # Python's caches keep every new string
    module = importlib.import_module(module_name)
    if class_name:
        own = getattr(module, class_name)
        same = [c for c in nn.Module.__subclasses__() if (c.__module__, c.__qualname__) == (module_name, class_name)]
        return [own, *(c for c in same if c is not own)]
    holders = [m for m in _modules(module_name.partition(".")[0]) if _is_of(m.__dict__.get(name), module)]
    return [module, *(m for m in holders if m is not module)]


def _modules(package: str) -> list[ModuleType]:
    """What of a package has been imported."""
    loaded = [m for key, m in list(sys.modules.items()) if key == package or key.startswith(f"{package}.")]
    return [m for m in loaded if isinstance(m, ModuleType)]


def _is_of(function: Any, module: Any) -> bool:
    """Whether a function was defined in a module; after a reload too, which keeps the module's namespace."""
    return getattr(function, "__globals__", None) is getattr(module, "__dict__", module)


def _found(library: Library) -> list[Found]:
    """Everything in the library that our table replaces, whether or not it is replaced at present.

    Raises:
        RuntimeError: the library lacks a class or module.
    """
    try:
        return [
            (owner, name, replacement)
            for (home, name), replacement in library.table.items()
            for owner in _owners(home, name)
        ]
    except (ImportError, AttributeError) as error:
        raise unsupported(library, str(error)) from error


def _install(library: Library) -> None:
    todo = []
    for owner, name, replacement in _found(library):
        function, known = owner.__dict__.get(name), kept_by(owner).get((owner, name))
        # What is known to be replaced and is not ours is another plugin's wrapper around ours: it still reaches us.
        if function is not replacement.ours and (known is None or function is known or _is_of(function, owner)):
            todo.append((owner, name, replacement))
    check(library, todo)
    for owner, name, replacement in todo:
        kept_by(owner)[owner, name] = owner.__dict__[name]
        setattr(owner, name, replacement.ours)


def _uninstall_if_unused() -> None:
    if not all(flags.is_stock for flags in (*(library.flags for library in _in_use()), *models_flags())):
        return
    ours = {replacement.ours for library in _in_use() for replacement in library.table.values()}
    for library in _in_use():
        for (home, name), replacement in library.table.items():
            for holder in _modules(library.name) if home.endswith(":") else ():
                if holder.__dict__.get(name) is replacement.ours:  # imported from where ours was
                    functions.setdefault((holder, name), original(importlib.import_module(home[:-1]), name))
    for (owner, name), theirs in [*originals.items(), *functions.items()]:
        function = owner.__dict__.get(name)
        if function in ours:
            setattr(owner, name, theirs)
        if function in ours or function is theirs or _is_of(function, owner):
            del kept_by(owner)[owner, name]  # else another plugin has wrapped ours: its wrapper still calls us


def _targets(model: nn.Module, names: Iterable[str] = ()) -> tuple[list[nn.Module], list[Library]]:
    """The modules in ``model`` whose methods are replaced, and their libraries: those of ``names``, else any.

    Raises:
        ValueError: not a module, or nothing of any library inside.
    """
    tables = [_table_of(name, needed=name in names) for name in names or LIBRARIES]
    wanted = " or ".join(f"{known.name} {', '.join(known.roots)}" for known in tables)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module that contains {wanted}; got {type(model).__name__}")
    targets: dict[Library, list[nn.Module]] = {}
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    for library in tables:
        homes = {home.partition(":")[0] for home, _ in library.table}
        if any(cls.__name__ in library.roots and cls.__module__ in homes for cls in classes):
            version_of(library)
            owners = tuple({owner for owner, _, _ in _found(library) if isinstance(owner, type)})
            targets[library] = [module for module in model.modules() if isinstance(module, owners)]
    if not targets:
        raise ValueError(
            f"{type(model).__name__} contains no {wanted.replace(' or ', ' and no ')}; valid is any module that does, "
            f"such as {' or '.join(known.example for known in tables)}, or a wrapper around one"
        )
    return [module for inside in targets.values() for module in inside], list(targets)


def _switch(
    libraries: list[Library],
    everywhere: dict[Library, Flags],
    models: list[tuple[nn.Module, Flags | None]],
    counts: tuple[dict[Any, int], ...] = (),
) -> None:
    """Let other choices hold, for every model or for some; ours in these libraries is in place before if needed."""
    if not all(own is None or own.is_stock for own in [*everywhere.values(), *(own for _, own in models)]):
        for library in libraries:
            _install(library)
    for library, flags in everywhere.items():
        library.flags = flags
    choose_for(models)
    counters: tuple[Counter[Any], ...] = (lib.calls, lib.fallbacks)
    for counter, before in zip(counters, counts):
        counter.clear()
        counter.update(before)
    _uninstall_if_unused()


class Handle:
    """What :func:`enable` returns. As a context manager, or by ``restore()``, it puts back what was there before it.

    Nested handles are left in the reverse order of their making, as ``with`` does.
    """

    def __init__(self, flags: Flags, modules: list[nn.Module], libraries: list[Library]) -> None:
        self.flags = flags
        self._libraries = libraries
        self._models = [(weakref.ref(module), own_flags(module)) for module in modules]
        self._everywhere = {} if modules else {library: library.flags for library in libraries}
        self._counts = dict(lib.calls), dict(lib.fallbacks)
        self._done = False

    def restore(self) -> None:
        """Put back what was there before, the counts of ``status()`` too; a second call does nothing."""
        with _lock:
            if not self._done:
                models = [(module, own) for ref, own in self._models if (module := ref()) is not None]
                _switch(self._libraries, self._everywhere, models, self._counts)
                self._done = True  # last: an interrupted restore can be repeated

    def __enter__(self) -> Handle:
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

    Args:
        mode: "matmul" (exact and fast), "interpolate_cached" (bit-identical), "grid_sample" (drifts; timm only), or
            "stock" (the library's own code: exempts a ``model``). "-" works like "_"; "matmul-resample" is "matmul".
        model: replace in this module only (anything that contains timm's NaFlexEmbeds, or one of transformers'
            towers that ``status().replaced`` names); beats the choice for every model.
        pos_embed: overrides ``mode`` for the position embeddings; the same names.
        patch_embed: overrides ``mode`` for timm's patch kernels: "matmul" or "stock".
        rope: overrides ``mode`` for timm's rotary tables: "batched" or "stock".
        library: "timm" (default), "transformers", or a tuple of both. With ``model`` it is found out.

    Returns:
        A handle; leaving it as a context manager restores what was there before.

    Raises:
        ValueError: an unknown name, or a model with nothing to replace; nothing is changed.
        RuntimeError: a library that is missing, too old, or whose methods differ; nothing is changed.

    >>> with enable():
    ...     print(status().flags)
    Flags(pos_embed='matmul', patch_embed='matmul', rope='batched')
    """
    if isinstance(mode, nn.Module):
        raise ValueError("the first argument of enable is a mode; give a model by name: enable(model=...)")
    flags = parse_flags(mode, pos_embed=pos_embed, patch_embed=patch_embed, rope=rope)
    wanted: Iterable[object] = library if isinstance(library, tuple | list) and library else (library,)
    names = [] if library is None else [check_name("library", name, LIBRARIES) for name in wanted]
    with _lock:
        modules: list[nn.Module] = []
        if model is None:
            libraries = [_table_of(name, needed=True) for name in names or ["timm"]]
        else:
            modules, libraries = _targets(model, names)
        for known in libraries:
            check_name(f"mode with {known.name}" if pos_embed is None else "pos_embed", flags.pos_embed, known.modes)
        handle = Handle(flags, modules, libraries)
        everywhere = dict.fromkeys(libraries, flags) if model is None else {}
        _switch(libraries, everywhere, [(module, flags) for module in modules], ({}, {}))
    return handle


def disable(model: nn.Module | None = None) -> None:
    """Put every library back exactly as it was, and end every model's own choice; or make one ``model`` stock again.

    ``disable()`` also frees kept tables and kernels, and the counts of ``status()`` start anew; ``disable(model)`` does
    neither. While a choice for every model holds, disabling a model exempts it until ``disable()``; otherwise its own
    choice is dropped.

    Raises:
        ValueError: ``model`` contains nothing that is replaced.

    >>> handle = enable("interpolate_cached")
    >>> disable()
    >>> status().replaced
    {}
    """
    with _lock:
        if model is None:
            forget_models()
            cache.clear_all()
            _switch([], dict.fromkeys(_in_use(), STOCK), [], ({}, {}))
        else:
            modules, libraries = _targets(model)
            exempt = not all(library.flags.is_stock for library in libraries)
            _switch([], {}, [(module, STOCK if exempt else None) for module in modules])


@dataclass(frozen=True)
class Status:
    """What is replaced by what. Prints as a table.

    ``flags`` is the choice for every model, ``models`` each model's own, ``replaced`` maps the libraries' methods to
    what computes them for every model (empty when nothing is replaced). Since the last ``enable()``: ``calls`` counts
    who computed which step, ``fallbacks`` why a library's own code ran although something else was chosen.
    Under ``torch.compile`` each trace counts, and the calls of a finished graph do not.
    """

    flags: Flags
    models: tuple[Flags, ...]
    replaced: dict[str, str]
    timm: str
    torch: str
    calls: dict[tuple[str, str], int]
    fallbacks: dict[str, int]

    def __str__(self) -> str:
        lines = [f"timm_naflex_fast on timm {self.timm}, torch {self.torch}", ""]
        if not self.replaced:
            nothing = "nothing is patched in this process; enable() or naflex-fast run does it (every model is stock)"
            return "\n".join([*lines, nothing])
        lines += _table([("method", "every model"), *self.replaced.items()])
        lines += [f"a model's own choice: {', '.join(f'{k}={v}' for k, v in asdict(f).items())}" for f in self.models]
        ran = [(f"{step}: {who}", str(n)) for (step, who), n in sorted(self.calls.items())]
        ran = ran or [("(nothing yet)", "0")]
        lines += ["", *_table([("what ran since enable()", "calls"), *ran])]
        return "\n".join([*lines, *self.why_stock()])

    def why_stock(self) -> list[str]:
        """One sentence for each reason why a library's own code ran although something else was chosen."""
        return [f"the library's own code ran {n} times because of {why}" for why, n in self.fallbacks.items()]


def _table(rows: list[tuple[str, str]]) -> list[str]:
    left, right = (max(len(row[i]) for row in rows) for i in (0, 1))
    rows = [rows[0], ("-" * left, "-" * right), *rows[1:]]
    return [f"{name:<{left}}  {value}" for name, value in rows]


def status() -> Status:
    """What is replaced by what at present, who has computed what since, with timm's and torch's versions.

    >>> status().calls
    {}
    """
    with _lock:
        replaced, flags = {}, STOCK
        for library in _in_use():
            flags = library.flags if flags.is_stock else flags
            for (home, name), replacement in sorted(library.table.items()):
                if sys.modules.get(home.partition(":")[0]) is None:
                    continue  # not imported, so nothing is replaced there
                owner: Any = _owners(home, name)[0]
                if owner.__dict__.get(name) is replacement.ours:
                    who = replacement.who.get(getattr(library.flags, replacement.step), "stock")
                    replaced[f"{owner.__name__}.{name}"] = who
        timms = getattr(sys.modules.get("timm"), "__version__", "(not imported)")
        return Status(
            flags,
            tuple(models_flags()),
            replaced,
            timms,
            torch.__version__,
            dict(lib.calls),
            dict(lib.fallbacks),
        )
