"""Puts our functions on a library's classes and takes them off again. No other file does.

Each ``enable()`` is a ``Choice``, which is put on a model's modules, or on libraries. While a
choice for a library has not ended, ours is in place there, and asks at each call what holds
(``calls.settings_for``). So nothing is put on or taken off when one choice hides another.

Everything is imported before the lock is taken: a thread that imports a library may be about to
call ``enable()``.
"""

# ``help(enable)`` then shows the name ``Mode``, not twice its seven values.
from __future__ import annotations

import functools
import importlib
import itertools
import logging
import sys
import weakref
from typing import Any

from torch import nn

from ..names import check_name
from ..pos_embed import kept
from . import calls
from .calls import CHOICES_ATTRIBUTE, STOCK, Counts, settings_for
from .choices import (
    Choice,
    Mode,
    end,
    holding,
    libraries_in_use,
    lock,
    parse_settings,
    put,
)
from .library import (
    Library,
    author_of,
    calls_ours,
    is_ours,
    known_libraries,
    sentence_on_not_served,
)
from .releases import check_supported

logger = logging.getLogger("timm_naflex_fast")

# Each has a file here, "timm_methods", with its ``LIBRARY``.
LIBRARIES = ("timm", "transformers")
# A model that we speed up contains one of these classes.
NONE_OF = (
    "no timm NaFlexEmbeds and no transformers Siglip2VisionEmbeddings, Cosmos3EdgeVisionEmbeddings, "
    "RadioPatchEmbeddings, HunYuanVLVisionPatchEmbed"
)


def _import_library(name: str, *, all_parts: bool = False) -> Library:
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
                getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"{name} cannot be imported, or lacks what timm_naflex_fast replaces: {error}"
        ) from error
    return library


def imported_libraries() -> list[Library]:
    """Those that this process has imported. Not to be called while the lock is held."""
    return [_import_library(name) for name in LIBRARIES if sys.modules.get(name)]


def _put_on(library: Library) -> bool:
    """Put ours where the library's own functions are. Whether there was any."""
    found = False
    for owner, name, replacement in library.places():
        method = vars(owner).get(name)
        if library.wrote(method):
            found = True
            replacement.original = getattr(owner, name)
            replacement.replaced = method
            replacement.is_static = isinstance(method, staticmethod)
            # Ours gets the method's name: a pickle of it can be read without this package.
            functools.update_wrapper(replacement.function, replacement.original, updated=())
            setattr(owner, name, replacement.function)
    return found


def _take_off_unneeded() -> None:
    """Put a library's own functions back where no choice needs ours, but for what is under another
    package's; and count what runs for the newest choice."""
    calls.call_counts = Counts()
    for choice in holding():
        calls.call_counts = choice.counts
    for library in known_libraries - libraries_in_use():
        for owner, name, replacement in library.places():
            if is_ours(vars(owner).get(name)):
                setattr(owner, name, replacement.replaced)


def _forget_graphs() -> None:
    """Let the compiler forget its graphs, because ours took the place of a library's own code.

    TorchDynamo looks a method up when it traces a call, and not again when the graph runs. Not to be
    called while the lock is held: a compiling thread may wait for it.
    """
    # The compiler takes seconds to import; where nobody has imported it, nothing is compiled.
    forget = getattr(sys.modules.get("torch._dynamo"), "reset_code_caches", None)
    if forget is not None:
        forget()


def modules_of(model: nn.Module) -> dict[Library, list[Any]]:
    """The modules in ``model`` whose methods are replaced, by the library that they are of.

    Raises:
        ValueError: not a module, or nothing of any library inside.
    """
    modules: dict[Library, list[Any]] = {}
    # Of a library that is not imported there is no module in the model.
    libraries = imported_libraries()
    parts = list(model.modules()) if isinstance(model, nn.Module) else []
    for library in libraries:
        classes = library.classes()
        inside = [part for part in parts if isinstance(part, classes)]
        if inside:
            modules[library] = inside
    if not modules:
        contains = f"{type(model).__name__} contains {NONE_OF}"
        others = sentence_on_not_served(libraries, map(type, parts))
        valid = "valid is any torch.nn.Module that contains one of them"
        raise ValueError("; ".join([contains, *others, valid]))
    return modules


def who_computes(library: Library, modules: list[Any]) -> dict[str, str]:
    """What computes each method in these modules or, without them, in any: the strategy, "stock", or
    what another package has put there. Several, where these modules differ."""
    computing = {}
    for owner, name, replacement in library.places():
        users = [owner]
        if modules:
            users = [each for each in modules if owner in type(each).__mro__]
        strategies = set()
        for user in users:
            function = getattr(user, name)
            if calls_ours(function):
                mode = getattr(settings_for(user, library), replacement.component)
                strategies.add(replacement.strategies.get(mode, "stock"))
            else:
                strategies.add(author_of(function))
        if strategies:
            computing[f"{owner.__name__}.{name}"] = ", ".join(sorted(strategies))
    return computing


def _log(places: dict[Library, list[Any]], model: nn.Module | None) -> None:
    """Say in one line what computes each method from now on, and in which modules of ``model``."""
    where = "every model"
    if model is not None:
        served = set(itertools.chain(*places.values()))
        where = f"the modules {[name for name, part in model.named_modules() if part in served]}"
    computing = {}
    for library, modules in places.items():
        computing[library.name] = who_computes(library, modules if model else [])
    logger.log(logging.INFO, "in %s: %s", where, computing)


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
            end(self._choice)
            _take_off_unneeded()

    def __enter__(self) -> Handle:
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

    ``status()`` counts anew, and the logger ``timm_naflex_fast`` gets one INFO line that says what is
    replaced by what. The newest call holds, until its handle is left or ``disable()`` ends
    all. What another package has put in place of a method before is an error that names it; on one
    module, or in a derived class, it is left as it is, and ``status(model)`` names it.

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
        RuntimeError: a library that is missing, too old, or whose methods differ or are another
            package's; with ``strict``, a table that would be left as it is; nothing is changed.

    >>> with enable():
    ...     print(status().flags)
    Settings(pos_embed='matmul', patch_embed='matmul', rope='batched')
    """
    settings = parse_settings(
        mode, strict=strict, pos_embed=pos_embed, patch_embed=patch_embed, rope=rope
    )
    places: dict[Library, list[Any]] = {}  # modules, or the library itself
    if model is None:
        names = library if isinstance(library, (tuple, list)) else (library,)
        for name in names:
            check_name("library", name, LIBRARIES)
            whole = _import_library(name, all_parts=True)
            places[whole] = [whole]
    else:
        places = modules_of(model)
    for each in places:
        check_name(f"the position embeddings of {each.name}", settings.pos_embed, each.modes)
    if strict and model is not None and settings.pos_embed != "stock":
        sentences = sentence_on_not_served(imported_libraries(), map(type, model.modules()))
        if sentences:
            raise RuntimeError(f"{'; '.join(sentences)}. Nothing was changed")

    choice = Choice(settings)
    handle = Handle(choice)
    replaced = False
    with lock:
        if settings != STOCK:
            # All is checked before the first is replaced.
            for each in places:
                check_supported(each)
            for each in places:
                replaced |= _put_on(each)
            choice.libraries = tuple(places)
        put(choice, places)
        _take_off_unneeded()
    if replaced:
        _forget_graphs()
    _log(places, model)
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
    places = {} if model is None else modules_of(model)
    with lock:
        if model is None:
            kept.clear_all()
            for choice in holding():
                end(choice)
        elif any(settings_for(None, library) != STOCK for library in places):
            # What was counted goes on.
            own = Choice(STOCK, counts=calls.call_counts)
            put(own, places)
        else:
            for module in itertools.chain(*places.values()):
                vars(module).pop(CHOICES_ATTRIBUTE, None)
        _take_off_unneeded()
