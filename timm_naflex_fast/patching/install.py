"""The only file that touches timm's classes: what is replaced, and how it is put back.

The replacements are put in place before a choice takes effect and removed after it ended, so that a forward pass in
another thread meets either choice and never a mixture.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..resampling.cache import clear_all, hold_over_fork
from .choice import choose, choose_globally, forget_all, global_flags, models_flags, own_flags
from .compatible import check_arguments, check_reads, installed_timm
from .modes import STOCK, Flags, parse_flags
from .timm import POS_EMBED, ROPE, originals
from .timm_kernels import OPTIONAL, PATCH_EMBED, RENAMED, resample_patch_embed

MODULE = "timm.layers.patch_embed"

_lock = threading.RLock()
hold_over_fork(_lock)  # after the caches' locks: those are taken while this one is held
_installed: dict[tuple[Any, str], Callable[..., Any]] = {}  # what of ours is set on which class or module of timm's


def _timm_classes() -> dict[type, dict[str, Callable[..., Any]]]:
    """timm's classes, NaFlexEmbeds first, and our methods by timm's names, after checking that timm's are the same.

    NaFlexVit is left out of a timm whose NaFlexVit has no rotary embeddings yet (1.0.16).

    Raises:
        RuntimeError: timm is too old, or a method is missing or takes other arguments; names what.
    """
    import timm

    installed_timm()
    try:
        from timm.layers import patch_embed
        from timm.models.naflexvit import NaFlexEmbeds, NaFlexVit, NaFlexVitCfg

        classes: dict[type, dict[str, Callable[..., Any]]] = {NaFlexEmbeds: {f.__name__: f for f in POS_EMBED}}
        classes |= {getattr(patch_embed, name): dict(methods) for name, methods in RENAMED.items()}
        classes[patch_embed.PatchEmbedInterpolator] |= {f.__name__: f for f in PATCH_EMBED}
        if hasattr(NaFlexVitCfg, "rope_type"):
            classes[NaFlexVit] = {f.__name__: f for f in ROPE}
        check_arguments({**classes, patch_embed: {"resample_patch_embed": resample_patch_embed}}, OPTIONAL)
    except (ImportError, AttributeError) as error:
        raise RuntimeError(f"timm {timm.__version__} does not have what timm_naflex_fast replaces: {error}") from error
    return {cls: {name: f for name, f in methods.items() if name in cls.__dict__} for cls, methods in classes.items()}


def _holders(function: Callable[..., Any]) -> list[ModuleType]:
    """timm's modules whose ``resample_patch_embed`` is ``function``: its own, and those that imported it by name."""
    modules = [module for name, module in list(sys.modules.items()) if name == "timm" or name.startswith("timm.")]
    return [m for m in modules if isinstance(m, ModuleType) and m.__dict__.get("resample_patch_embed") is function]


def _install() -> None:
    methods = [(cls, name, f) for cls, functions in _timm_classes().items() for name, f in functions.items()]
    # What is marked installed without being ours is another plugin's wrapper around ours: it still reaches us.
    todo: list[tuple[Any, str, Callable[..., Any]]]
    todo = [(c, n, f) for c, n, f in methods if (c, n) not in _installed or c.__dict__[n] is originals[f.__name__]]
    check_reads((cls, name) for cls, name, _ in todo)
    for cls, name, function in todo:
        originals[function.__name__] = cls.__dict__[name]
    name, home = "resample_patch_embed", sys.modules[MODULE]
    if (home, name) not in _installed:
        originals[name] = home.__dict__[name]
    todo += [(module, name, resample_patch_embed) for module in _holders(originals[name])]
    for owner, attribute, function in todo:
        setattr(owner, attribute, function)
        _installed[owner, attribute] = function


def _uninstall_if_unused() -> None:
    if not all(flags.is_stock for flags in (global_flags(), *models_flags())):
        return
    for module in _holders(resample_patch_embed):  # modules that were imported meanwhile have ours
        _installed[module, "resample_patch_embed"] = resample_patch_embed
    for (owner, name), function in list(_installed.items()):
        if owner.__dict__.get(name) is function:  # else another plugin sits on top of us: leave it alone
            setattr(owner, name, originals[function.__name__])
            del _installed[owner, name]


def _targets(model: nn.Module) -> list[nn.Module]:
    """The modules in ``model`` whose methods are replaced.

    Raises:
        ValueError: not a module, or no NaFlexEmbeds inside.
    """
    classes = tuple(_timm_classes())
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a torch.nn.Module that contains timm's NaFlexEmbeds; got {type(model).__name__}"
        )
    found = [module for module in model.modules() if isinstance(module, classes)]
    if not any(isinstance(module, classes[0]) for module in found):
        raise ValueError(
            f"{type(model).__name__} contains no timm NaFlexEmbeds; valid is any module that does, "
            "such as timm.create_model('naflexvit_base_patch16_gap') or a wrapper around one"
        )
    return found


class Handle:
    """What :func:`enable` returns. As a context manager, or by ``restore()``, it puts back what was there before it.

    Nested handles are left in the reverse order of their making, as ``with`` does.
    """

    def __init__(self, flags: Flags, previous: Flags, modules: list[nn.Module], previous_own: list[Flags | None]):
        self.flags = flags
        self._previous = previous
        self._modules = [weakref.ref(module) for module in modules]
        self._previous_own = previous_own
        self._done = False

    def restore(self) -> None:
        """Put back what was there before; a second call does nothing."""
        with _lock:
            if self._done:
                return
            self._done = True
            if not self._modules:
                if not self._previous.is_stock:
                    _install()
                choose_globally(self._previous)
            else:
                alive = [(ref(), own) for ref, own in zip(self._modules, self._previous_own)]
                if any(own is not None and not own.is_stock for _, own in alive):
                    _install()
                choose([m for m, _ in alive if m is not None], [own for m, own in alive if m is not None])
            _uninstall_if_unused()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.restore()

    def __repr__(self) -> str:
        scope = "one model" if self._modules else "every model"
        return f"<timm_naflex_fast {self.flags} for {scope}{', restored' if self._done else ''}>"


def enable(
    mode: str = "matmul",
    *,
    model: nn.Module | None = None,
    pos_embed: str | None = None,
    patch_embed: str | None = None,
    rope: str | None = None,
) -> Handle:
    """Replace timm's resampling, for every NaFlexVit (made before or after) or for one.

    Args:
        mode: "matmul" (exact and fast), "interpolate_cached" (bit-identical), "grid_sample" (drifts), or "stock"
            (timm's own code: exempts a ``model``). "-" works like "_"; "matmul-resample" is "matmul".
        model: replace in this module only (anything that contains NaFlexEmbeds); beats the global choice.
        pos_embed: overrides ``mode`` for the position embeddings; the same names.
        patch_embed: overrides ``mode`` for the patch kernels: "matmul" or "stock".
        rope: overrides ``mode`` for the rotary tables: "batched" or "stock".

    Returns:
        A handle; leaving it as a context manager restores what was there before.

    Raises:
        ValueError: an unknown name, or a model without NaFlexEmbeds; nothing is changed.
        RuntimeError: a timm that is too old or whose methods differ; nothing is changed.
    """
    if isinstance(mode, nn.Module):
        raise ValueError("the first argument of enable is a mode; give a model by name: enable(model=...)")
    flags = parse_flags(mode, pos_embed=pos_embed, patch_embed=patch_embed, rope=rope)
    with _lock:
        modules = [] if model is None else _targets(model)
        handle = Handle(flags, global_flags(), modules, [own_flags(module) for module in modules])
        if not flags.is_stock:
            _install()
        if model is None:
            choose_globally(flags)
        else:
            choose(modules, [flags] * len(modules))
        _uninstall_if_unused()
    return handle


def disable(model: nn.Module | None = None) -> None:
    """Put timm back exactly as it was, every model's own choice included; or make one ``model`` timm's own again.

    While a global choice holds, disabling a model exempts it until ``disable()``; otherwise it drops the model's own.

    Raises:
        ValueError: ``model`` contains no NaFlexEmbeds.
    """
    with _lock:
        if model is None:
            forget_all()
            clear_all()
        else:
            modules = _targets(model)
            choose(modules, [None if global_flags().is_stock else STOCK] * len(modules))
        _uninstall_if_unused()


@dataclass(frozen=True)
class Status:
    """What is replaced by what. Prints as a table.

    ``flags`` is the global choice, ``models`` each model's own, ``replaced`` maps timm's methods to the strategy
    that stands in for them globally (empty when timm is as it was).
    """

    flags: Flags
    models: tuple[Flags, ...]
    replaced: dict[str, str]
    timm: str
    torch: str

    def __str__(self) -> str:
        rows = [("timm method", "every model"), *self.replaced.items()]
        if not self.replaced:
            rows.append(("(all)", "stock"))
        width = max(len(name) for name, _ in rows)
        rows.insert(1, ("-" * width, "-" * max(len(strategy) for _, strategy in rows)))
        lines = [f"timm_naflex_fast on timm {self.timm}, torch {self.torch}", ""]
        lines += [f"{name:<{width}}  {strategy}" for name, strategy in rows]
        lines += [f"a model of its own: {', '.join(f'{k}={v}' for k, v in f.as_dict().items())}" for f in self.models]
        return "\n".join(lines)


def status() -> Status:
    """What is replaced by what at present, with timm's and torch's versions."""
    import timm

    def rows() -> Iterator[tuple[str, str]]:
        for (owner, name), function in sorted(_installed.items(), key=lambda item: (item[0][0].__name__, item[0][1])):
            if owner.__dict__.get(name) is not function or (owner.__name__ != MODULE and isinstance(owner, ModuleType)):
                continue
            strategy = flags.pos_embed if function in POS_EMBED else flags.patch_embed
            if function in ROPE:
                strategy = flags.rope
            elif strategy in ("matmul", "interpolate_cached") and name.endswith("_grid_sample"):
                strategy = "stock"
            elif strategy == "grid_sample" and "naflex" not in name:
                strategy = "stock"
            yield f"{owner.__name__}.{name}", strategy

    with _lock:
        flags = global_flags()
        return Status(flags, tuple(models_flags()), dict(rows()), timm.__version__, torch.__version__)
