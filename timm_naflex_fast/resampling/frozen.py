"""Resampled patch kernels of frozen weights, reused between calls for as long as the weights hold the same bits."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from .cache import finished
from .patch_kernels import is_traced


def is_frozen(weight: Tensor) -> bool:
    """Whether a kernel resampled from ``weight`` may be kept: no gradient is asked for, and comparing pays.

    On an accelerator it does not: the host would have to wait for the answer, and resampling again costs no more.
    """
    return weight.device.type == "cpu" and not (torch.is_grad_enabled() and weight.requires_grad) and not is_traced()


def frozen_kernel(
    weight: Tensor, size: tuple[int, int], how: Hashable, resample: Callable[[Tensor, tuple[int, int]], Tensor]
) -> Tensor:
    """``resample(weight, size)``, from an earlier call if ``weight`` has the same bits as then; not to be written to.

    The bits themselves are compared, at one read of the weight and its copy: version counter and address miss writes
    through ``.data``, NumPy or another process, and a checksum would miss some of all kinds. ``how`` names whatever
    else the result depends on.
    """
    (kernel,) = finished((weight,), [size], ("patch kernel", how), lambda size: resample(weight, size))
    return kernel
