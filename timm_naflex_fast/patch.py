"""The only file that touches timm: which methods are replaced, by what, and how they are put back.

While anything is enabled, each replaced method is a dispatcher: it looks up the choice that holds for its module (the
model's own, else the global one), once, and calls that strategy or timm's original. Dispatchers are put in place
before a choice takes effect and removed after it ended, so that a forward pass in another thread meets either choice
and never a mixture. The choice of a model is an attribute of its modules: it goes along with ``deepcopy`` and with
an EMA copy, and is no part of ``state_dict``.
"""

from __future__ import annotations

import inspect
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .flags import STOCK, Flags, parse_flags
from .grids import check_coord, check_tokens, group_grids, whole_batch
from .patch_embed import resample_linear_kernel, resample_patch_kernel
from .resize import SEPARABLE_MODES, Resampling
from .strategies import grid_sample, interpolate_cached, matmul

OLDEST_TIMM = (1, 0, 16)
_CHOICE = "_naflex_fast_choice"  # the attribute that holds a model's own choice

_lock = threading.RLock()
_global = STOCK
_choices: weakref.WeakSet[ModelChoice] = weakref.WeakSet()
_chosen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_originals: dict[str, Callable[..., Any]] = {}
_installed: list[tuple[type, str]] = []
_warned: set[str] = set()


class ModelChoice:
    """The flags of one model, shared by its modules; None once ended. Pickles as a plain dict, readable anywhere."""

    def __init__(self, flags: Flags) -> None:
        self.flags: Flags | None = flags
        _choices.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelChoice | None:
        return None if self.flags is None else ModelChoice(self.flags)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return dict, ({} if self.flags is None else self.flags.as_dict(),)


def _own_choice(module: nn.Module) -> Flags | None:
    choice = module.__dict__.get(_CHOICE)
    if isinstance(choice, dict):  # unpickled
        choice = module.__dict__[_CHOICE] = ModelChoice(Flags(**choice)) if choice else None
    return choice.flags if choice is not None else None


def _flags(module: nn.Module) -> Flags:
    return _own_choice(module) or _global


# ---- the replacements: each says only what differs from timm's method of that name ----


def _apply_learned_naflex_pos_embed(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: the chosen strategy; a token gets the cell its own coordinate names."""
    flags = _flags(self)
    if flags.pos_embed == "stock" or not _separable(self):
        return _originals["_apply_learned_naflex_pos_embed"](self, x, patch_coord)
    check_tokens(x, self.pos_embed.shape[-1])
    if flags.pos_embed == "grid_sample":
        check_coord(patch_coord, x)
        return grid_sample.add_learned(x, self.pos_embed, patch_coord, _resampling(self), dense_positions=_dense())
    return _add_learned(flags.pos_embed, x, self.pos_embed, patch_coord, _resampling(self))


def _apply_learned_naflex_pos_embed_grid_sample(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: under "grid_sample" ours (the same numbers); otherwise what the model's author chose stays."""
    if _flags(self).pos_embed != "grid_sample":
        return _originals["_apply_learned_naflex_pos_embed_grid_sample"](self, x, patch_coord)
    check_tokens(x, self.pos_embed.shape[-1])
    check_coord(patch_coord, x)
    return grid_sample.add_learned(x, self.pos_embed, patch_coord, _resampling(self), dense_positions=_dense())


def _apply_learned_pos_embed(self: Any, x: Tensor, grid_size: Any) -> None:
    """Modifications: the chosen strategy. While compiling, timm's, which captures; "grid_sample" is NaFlex-only."""
    strategy = _flags(self).pos_embed
    if strategy in ("stock", "grid_sample") or _capturing() or not _separable(self):
        return _originals["_apply_learned_pos_embed"](self, x, grid_size)
    check_tokens(x, self.pos_embed.shape[-1])
    add = matmul.add_learned if strategy == "matmul" else interpolate_cached.add_learned
    return add(x, self.pos_embed, whole_batch(x, grid_size), _resampling(self))


def _apply_factorized_naflex_pos_embed(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: the chosen strategy; a token gets the cell its own coordinate names."""
    strategy = _flags(self).pos_embed
    if strategy == "stock":
        return _originals["_apply_factorized_naflex_pos_embed"](self, x, patch_coord)
    check_tokens(x, self.pos_embed_y.shape[-1])
    tables = self.pos_embed_y, self.pos_embed_x
    if strategy == "grid_sample":
        check_coord(patch_coord, x)
        return grid_sample.add_factorized(x, *tables, patch_coord, self.pos_embed_ar_preserving)
    return _add_factorized(strategy, x, *tables, patch_coord, self.pos_embed_ar_preserving)


def _apply_factorized_naflex_pos_embed_grid_sample(self: Any, x: Tensor, patch_coord: Tensor) -> None:
    """Modifications: under "grid_sample" ours (the same numbers); otherwise what the model's author chose stays."""
    if _flags(self).pos_embed != "grid_sample":
        return _originals["_apply_factorized_naflex_pos_embed_grid_sample"](self, x, patch_coord)
    check_tokens(x, self.pos_embed_y.shape[-1])
    check_coord(patch_coord, x)
    tables = self.pos_embed_y, self.pos_embed_x
    return grid_sample.add_factorized(x, *tables, patch_coord, self.pos_embed_ar_preserving)


def _apply_factorized_pos_embed(self: Any, x: Tensor, grid_size: Any) -> None:
    """Modifications: the chosen strategy. While compiling, timm's, which captures; "grid_sample" is NaFlex-only."""
    strategy = _flags(self).pos_embed
    if strategy in ("stock", "grid_sample") or _capturing():
        return _originals["_apply_factorized_pos_embed"](self, x, grid_size)
    check_tokens(x, self.pos_embed_y.shape[-1])
    add = matmul.add_factorized if strategy == "matmul" else interpolate_cached.add_factorized
    return add(x, self.pos_embed_y, self.pos_embed_x, whole_batch(x, grid_size), self.pos_embed_ar_preserving)


def resample_linear_weight(self: Any, weight: Tensor, target_patch_size: tuple[int, int]) -> Tensor:
    """Modifications: one full-precision product with a pseudo-inverse kept across models and calls."""
    h, w = target_patch_size
    if _flags(self).patch_embed == "stock" or self.interpolation not in SEPARABLE_MODES or _capturing():
        return _originals["resample_linear_weight"](self, weight, target_patch_size)
    if (h, w) == tuple(self.base_patch_size):
        return weight
    return resample_linear_kernel(
        weight,
        tuple(self.base_patch_size),
        (h, w),
        self.in_chans,
        channels_last=getattr(self, "channels_last", True),
        mode=self.interpolation,
        antialias=self.antialias,
    )


def resample_conv_weight(self: Any, weight: Tensor, target_patch_size: tuple[int, int]) -> Tensor:
    """Modifications: one full-precision product with a pseudo-inverse kept across models and calls."""
    if _flags(self).patch_embed == "stock" or self.interpolation not in SEPARABLE_MODES or _capturing():
        return _originals["resample_conv_weight"](self, weight, target_patch_size)
    h, w = target_patch_size
    return resample_patch_kernel(weight, (h, w), mode=self.interpolation, antialias=self.antialias)


# Reading the grids back to the host cannot be captured, so under torch.compile these two are a graph break, as
# timm's own loops are.


@torch.compiler.disable
def _add_learned(strategy: str, x: Tensor, table: Tensor, patch_coord: Tensor, how: Resampling) -> None:
    add = matmul.add_learned if strategy == "matmul" else interpolate_cached.add_learned
    add(x, table, group_grids(patch_coord, x), how)


@torch.compiler.disable
def _add_factorized(
    strategy: str, x: Tensor, table_y: Tensor, table_x: Tensor, patch_coord: Tensor, ar_preserving: bool
) -> None:
    add = matmul.add_factorized if strategy == "matmul" else interpolate_cached.add_factorized
    add(x, table_y, table_x, group_grids(patch_coord, x), ar_preserving)


def _resampling(embeds: Any) -> Resampling:
    """The table's resampling; older timm has neither antialias nor align_corners to set and uses these."""
    return Resampling(
        embeds.pos_embed_interp_mode,
        getattr(embeds, "pos_embed_antialias", True),
        getattr(embeds, "pos_embed_align_corners", False),
        embeds.pos_embed_ar_preserving,
    )


def _separable(embeds: Any) -> bool:
    mode = embeds.pos_embed_interp_mode
    if mode in SEPARABLE_MODES:
        return True
    if mode not in _warned:
        _warned.add(mode)
        warnings.warn(
            f"timm_naflex_fast: a position table with interpolation mode {mode!r} stays with timm's own code; "
            f"replaced are {', '.join(map(repr, SEPARABLE_MODES))}",
            stacklevel=4,
        )
    return False


def _capturing() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def _dense() -> bool:
    """Whether the installed timm takes its grid_sample positions from a dense affine grid, as older releases do."""
    import timm.models.naflexvit as naflexvit

    return not hasattr(naflexvit, "_normalize_naflex_grid_sample_coords")


# ---- putting them in place and taking them back ----

_POS_EMBED = (
    _apply_learned_naflex_pos_embed,
    _apply_learned_naflex_pos_embed_grid_sample,
    _apply_learned_pos_embed,
    _apply_factorized_naflex_pos_embed,
    _apply_factorized_naflex_pos_embed_grid_sample,
    _apply_factorized_pos_embed,
)
_PATCH_EMBED = (resample_linear_weight, resample_conv_weight)


def _timm_classes() -> tuple[type, type]:
    """timm's NaFlexEmbeds and PatchEmbedInterpolator, after checking that they still are what we replace.

    Raises:
        RuntimeError: timm is too old, or a method is missing or takes other arguments; names what.
    """
    import timm

    found = tuple(int(n) for n in re.findall(r"\d+", timm.__version__)[:3])
    oldest = ".".join(map(str, OLDEST_TIMM))
    if found < OLDEST_TIMM:
        raise RuntimeError(f"timm_naflex_fast needs timm >= {oldest}; installed is {timm.__version__}")
    try:
        from timm.layers.patch_embed import PatchEmbedInterpolator
        from timm.models.naflexvit import NaFlexEmbeds
    except ImportError as error:
        raise RuntimeError(f"timm {timm.__version__} does not have what timm_naflex_fast replaces: {error}") from error
    wrong = []
    for cls, functions in ((NaFlexEmbeds, _POS_EMBED), (PatchEmbedInterpolator, _PATCH_EMBED)):
        for function in functions:
            method = cls.__dict__.get(function.__name__)
            if method is None:
                wrong.append(f"{cls.__name__}.{function.__name__} is missing")
            elif list(inspect.signature(method).parameters) != list(inspect.signature(function).parameters):
                wrong.append(f"{cls.__name__}.{function.__name__} takes {inspect.signature(method)}")
    if wrong:
        raise RuntimeError(
            f"timm {timm.__version__} is not supported by this timm_naflex_fast (timm >= {oldest} is, as long as its "
            f"methods are the same): {'; '.join(wrong)}. Nothing was changed"
        )
    return NaFlexEmbeds, PatchEmbedInterpolator


def _install() -> None:
    if _installed:
        return
    embeds, interpolator = _timm_classes()
    todo = [(embeds, f) for f in _POS_EMBED] + [(interpolator, f) for f in _PATCH_EMBED]
    for cls, function in todo:
        if cls.__dict__[function.__name__] is not function:  # still ours where somebody wrapped and unwrapped us
            _originals[function.__name__] = cls.__dict__[function.__name__]
    for cls, function in todo:
        setattr(cls, function.__name__, function)
        _installed.append((cls, function.__name__))


def _uninstall_if_unused() -> None:
    if not _global.is_stock or any(c.flags is not None and not c.flags.is_stock for c in list(_choices)):
        return
    for cls, name in _installed:
        if cls.__dict__.get(name) is globals()[name]:  # else another plugin sits on top of us: leave it alone
            setattr(cls, name, _originals[name])
    _installed.clear()


def _targets(model: nn.Module) -> list[nn.Module]:
    """The modules in ``model`` whose methods are replaced.

    Raises:
        ValueError: not a module, or no NaFlexEmbeds inside.
    """
    embeds, interpolator = _timm_classes()
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a torch.nn.Module that contains timm's NaFlexEmbeds; got {type(model).__name__}"
        )
    found = [module for module in model.modules() if isinstance(module, (embeds, interpolator))]
    if not any(isinstance(module, embeds) for module in found):
        raise ValueError(
            f"{type(model).__name__} contains no timm NaFlexEmbeds; valid is any module that does, "
            "such as timm.create_model('naflexvit_base_patch16_gap') or a wrapper around one"
        )
    return found


def _choose(modules: list[nn.Module], flags: list[Flags | None]) -> None:
    made: dict[Flags, ModelChoice] = {}
    for module, own in zip(modules, flags):
        if own is None:
            module.__dict__.pop(_CHOICE, None)
        else:
            module.__dict__[_CHOICE] = made[own] = made.get(own) or ModelChoice(own)
            _chosen.add(module)


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
        global _global
        with _lock:
            if self._done:
                return
            self._done = True
            if not self._modules:
                if not self._previous.is_stock:
                    _install()
                _global = self._previous
            else:
                alive = [(ref(), own) for ref, own in zip(self._modules, self._previous_own)]
                if any(own is not None and not own.is_stock for _, own in alive):
                    _install()
                _choose([m for m, _ in alive if m is not None], [own for m, own in alive if m is not None])
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
        rope: "stock" (timm's own) is the only choice yet.

    Returns:
        A handle; leaving it as a context manager restores what was there before.

    Raises:
        ValueError: an unknown name, or a model without NaFlexEmbeds; nothing is changed.
        RuntimeError: a timm that is too old or whose methods differ; nothing is changed.
    """
    global _global
    flags = parse_flags(mode, pos_embed=pos_embed, patch_embed=patch_embed, rope=rope)
    with _lock:
        modules = [] if model is None else _targets(model)
        handle = Handle(flags, _global, modules, [_own_choice(module) for module in modules])
        if not flags.is_stock:
            _install()
        if model is None:
            _global = flags
        else:
            _choose(modules, [flags] * len(modules))
        _uninstall_if_unused()
    return handle


def disable(model: nn.Module | None = None) -> None:
    """Put timm back exactly as it was, every model's own choice included; or make one ``model`` timm's own again.

    Raises:
        ValueError: ``model`` contains no NaFlexEmbeds.
    """
    global _global
    with _lock:
        if model is None:
            _global = STOCK
            _choose(list(_chosen), [None] * len(_chosen))
            for choice in list(_choices):  # those of copies, which nobody told us of
                choice.flags = None
            interpolate_cached.cache.clear()
        else:
            modules = _targets(model)
            _choose(modules, [None if _global.is_stock else STOCK] * len(modules))
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
        for cls, name in _installed:
            if cls.__dict__.get(name) is not globals()[name]:
                continue
            strategy = _global.patch_embed if globals()[name] in _PATCH_EMBED else _global.pos_embed
            if strategy in ("matmul", "interpolate_cached") and name.endswith("_grid_sample"):
                strategy = "stock"
            if strategy == "grid_sample" and "naflex" not in name:
                strategy = "stock"
            yield f"{cls.__name__}.{name}", strategy

    with _lock:
        own = tuple(choice.flags for choice in list(_choices) if choice.flags is not None)
        return Status(_global, own, dict(rows()), timm.__version__, torch.__version__)
