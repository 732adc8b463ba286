"""Patch-embedding kernels resampled as one product with a cached pseudo-inverse (FlexiViT, Beyer et al. 2023).

A kernel ``k`` for another patch size must answer a resized patch as the old one answered the original:
``<k', R p> = <k, p>`` for every patch p, hence ``k' = pinv(R)^T k`` with R the (h*w, H0*W0) resize matrix.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from .precision import product
from .resize import check_mode, constants


@lru_cache(maxsize=64)
def _pseudo_inverse(
    old: tuple[int, int], new: tuple[int, int], mode: str, antialias: bool, device: torch.device
) -> Tensor:
    """pinv(R) (H0*W0, h*w), float32, computed as timm does: R by resizing every basis patch."""
    with constants(device):
        basis = torch.eye(old[0] * old[1], dtype=torch.float32, device=device).reshape(-1, 1, *old)
        resized = F.interpolate(basis, size=new, mode=mode, antialias=antialias, align_corners=False)
        return torch.linalg.pinv(resized.flatten(1).t())


def resample_patch_kernel(
    weight: Tensor, size: tuple[int, int], *, mode: str = "bicubic", antialias: bool = True
) -> Tensor:
    """Resample convolution kernels (O, I, H0, W0) to (O, I, h, w), ``size`` = (h, w).

    Computed in float32 whatever the dtype, autocast or TF32 flags, and cast back; a kernel of that size already is
    returned as it is. Source: ``timm.layers.patch_embed.resample_patch_embed``.

    Raises:
        ValueError: weight not 4-D, size not two positive integers, or a mode that is not bilinear or bicubic.
    """
    if weight.ndim != 4:
        raise ValueError(f"weight must have shape (O, I, H0, W0); got {tuple(weight.shape)}")
    if len(size) != 2 or min(size) < 1:
        raise ValueError(f"size must be (h, w), both at least 1; got {tuple(size)}")
    check_mode(mode)
    old, new = (weight.shape[2], weight.shape[3]), (int(size[0]), int(size[1]))
    if old == new:
        return weight
    inverse = _pseudo_inverse(old, new, mode, antialias, weight.device)
    return product(weight.flatten(2).float(), inverse).reshape(*weight.shape[:2], *new).to(weight.dtype)


def resample_linear_kernel(
    weight: Tensor,
    old: tuple[int, int],
    size: tuple[int, int],
    in_chans: int,
    *,
    channels_last: bool = True,
    mode: str = "bicubic",
    antialias: bool = True,
) -> Tensor:
    """Resample a linear patch embedding (O, H0*W0*I), or (O, I*H0*W0) unless ``channels_last``, to ``size``."""
    if channels_last:
        kernels = weight.reshape(len(weight), *old, in_chans).permute(0, 3, 1, 2)
    else:
        kernels = weight.reshape(len(weight), in_chans, *old)
    kernels = resample_patch_kernel(kernels, size, mode=mode, antialias=antialias)
    return (kernels.permute(0, 2, 3, 1) if channels_last else kernels).reshape(len(weight), -1)
