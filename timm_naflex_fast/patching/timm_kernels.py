"""The methods and the function that stand in for timm's patch-kernel resampling. Each says only what differs.

Each is a dispatcher, as in ``replacements``: it looks up the flags that hold, once, and calls ours or timm's original.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..resampling.frozen import frozen_kernel, is_frozen
from ..resampling.matrices import SEPARABLE_MODES
from ..resampling.patch_kernels import prewarm_factors, resample_linear_kernel, resample_patch_kernel
from .choice import flags_for, global_flags
from .modes import Flags
from .timm import originals

_within = threading.local()


def resample_linear_weight(self: Any, weight: Tensor, target_patch_size: tuple[int, int]) -> Tensor:
    """Modifications: two 1-D pseudo-inverses, kept across models and calls, and a separable product."""
    if _stock_kernel(flags_for(self), self.interpolation, weight):
        return _timms("resample_linear_weight", self, weight, target_patch_size)
    h, w = target_patch_size
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
    """Modifications: as in resample_linear_weight."""
    fits = weight.ndim == 4 and tuple(weight.shape[2:]) == tuple(self.base_patch_size)
    if not fits or _stock_kernel(flags_for(self), self.interpolation, weight):
        return _timms("resample_conv_weight", self, weight, target_patch_size)
    h, w = target_patch_size
    return resample_patch_kernel(weight, (h, w), mode=self.interpolation, antialias=self.antialias)


def interpolator_forward(
    self: Any,
    patches: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor | None = None,
    patch_size: tuple[int, int] | None = None,
    is_linear: bool = True,
) -> Tensor:
    """Modifications: while the weight is frozen its resampled kernel is reused; an empty batch works."""
    base = tuple(self.base_patch_size)
    h, w = size = base if patch_size is None else tuple(patch_size)
    takes = size != base and (patches.ndim == 5 or not is_linear)
    if not takes or _stock_kernel(flags_for(self), self.interpolation, proj_weight):
        return originals["interpolator_forward"](self, patches, proj_weight, proj_bias, patch_size, is_linear)
    resample = self.resample_linear_weight if is_linear else self.resample_conv_weight
    if is_frozen(proj_weight):
        layout = (self.in_chans, getattr(self, "channels_last", True)) if is_linear else None
        weight = frozen_kernel(proj_weight, (h, w), (base, self.interpolation, self.antialias, layout), resample)
    else:
        weight = resample(proj_weight, size)
    if is_linear:
        return F.linear(patches.flatten(2), weight, proj_bias)
    return F.conv2d(patches, weight, proj_bias, stride=size)


def interpolator_prewarm(self: Any, target_patch_sizes: Any, device: Any = None) -> None:
    """Modifications: computes our factors for the model's layout in place of timm's matrices."""
    sizes = list(target_patch_sizes)
    self.resampler.prewarm(sizes, device=device)
    if self.channels_last:
        _prewarm(self, self.base_patch_size, sizes, self.resampler._cache_device_anchor, device, self.in_chans)


def resampler_forward(self: Any, patch_embed: Tensor, new_size: Any) -> Tensor:
    """Modifications: as in resample_linear_weight."""
    fits = patch_embed.ndim == 4 and len(new_size) == 2 and tuple(patch_embed.shape[2:]) == tuple(self.orig_size)
    if not fits or _stock_kernel(flags_for(self), self.interpolation, patch_embed):
        return originals["resampler_forward"](self, patch_embed, new_size)
    return resample_patch_kernel(patch_embed, tuple(new_size), mode=self.interpolation, antialias=self.antialias)


def resampler_prewarm(self: Any, new_sizes: Any, device: Any = None) -> None:
    """Modifications: computes our factors in place of timm's matrices."""
    sizes = list(new_sizes)
    if not _prewarm(self, self.orig_size, sizes, self._cache_device_anchor, device, 1):
        originals["resampler_prewarm"](self, sizes, device)


def resample_patch_embed(
    patch_embed: Tensor, new_size: Any, interpolation: str = "bicubic", antialias: bool = True, verbose: bool = False
) -> Tensor:
    """Modifications: as in resample_linear_weight. A function, so the global choice holds, no model's own."""
    fits = patch_embed.ndim == 4 and len(new_size) == 2 and not getattr(_within, "timms_method", False)
    if not fits or _stock_kernel(global_flags(), interpolation, patch_embed):
        return originals["resample_patch_embed"](patch_embed, new_size, interpolation, antialias, verbose)
    return resample_patch_kernel(patch_embed, tuple(new_size), mode=interpolation, antialias=antialias)


def _timms(name: str, interpolator: Any, *arguments: Any) -> Tensor:
    """timm's own method and nothing of ours below it: in older releases it calls ``resample_patch_embed``."""
    if hasattr(interpolator, "resampler"):
        return originals[name](interpolator, *arguments)
    _within.timms_method = True
    try:
        return originals[name](interpolator, *arguments)
    finally:
        _within.timms_method = False


def _stock_kernel(flags: Flags, mode: str, weight: Tensor) -> bool:
    """Whether timm's own code resamples this kernel: as chosen, or because it is no ordinary tensor with values."""
    if flags.patch_embed == "stock" or mode not in SEPARABLE_MODES:
        return True
    return not torch.compiler.is_compiling() and (
        type(weight) not in (Tensor, torch.nn.Parameter) or weight.device.type == "meta"
    )


def _prewarm(module: Any, old: Any, sizes: list[Any], anchor: Tensor, device: Any, inner: int) -> bool:
    """Compute the factors of each size, unless timm's own code is to serve: False."""
    device = anchor.device if device is None else torch.empty(0, device=device).device
    chosen = flags_for(module).patch_embed != "stock" and module.interpolation in SEPARABLE_MODES
    if not chosen or device.type == "meta":
        return False
    for size in sizes:
        h, w = (size, size) if isinstance(size, int) else size
        prewarm_factors(tuple(old), (h, w), module.interpolation, module.antialias, inner, device)
    return True


PATCH_EMBED = (resample_linear_weight, resample_conv_weight)
# Those whose names say which class they belong to, by timm's names; releases without a prewarm are left without.
RENAMED: dict[str, dict[str, Callable[..., Any]]] = {
    "PatchEmbedInterpolator": {"forward": interpolator_forward, "prewarm": interpolator_prewarm},
    "PatchEmbedResamplerFixedOrigSize": {"forward": resampler_forward, "prewarm": resampler_prewarm},
}
OPTIONAL = ("prewarm",)
