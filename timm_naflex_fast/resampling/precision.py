"""Keep float32 products exact: autocast would compute them in bf16, and TF32 would round the factors."""

from __future__ import annotations

import torch


def no_autocast(device: torch.device) -> torch.autocast:
    """A context in which autocast leaves this device's operations alone."""
    return torch.autocast(device_type=device.type, enabled=False)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a product of ``dtype`` factors is at least as exact as IEEE ``dtype``.

    This reads PyTorch's global settings and never changes them: another thread may use them.
    """
    if dtype is not torch.float32:
        return dtype
    try:
        lowered = torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # PyTorch refuses to answer once its per-backend flags were set
        lowered = True
    return torch.float64 if lowered else dtype
