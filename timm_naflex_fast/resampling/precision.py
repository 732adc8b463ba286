"""Keeping float32 products float32: autocast would turn them into bf16, TF32 and its kin round the factors."""

from __future__ import annotations

import torch


def no_autocast(device: torch.device) -> torch.autocast:
    """A context in which autocast leaves this device's operations alone."""
    return torch.autocast(device_type=device.type, enabled=False)


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a product of ``dtype`` factors is at least as exact as IEEE ``dtype``.

    Reading a flag and widening leaves PyTorch's global settings alone, which another thread may be using.
    """
    if dtype is not torch.float32:
        return dtype
    try:
        lowered = torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # PyTorch refuses to answer once its per-backend flags were set
        lowered = True
    return torch.float64 if lowered else dtype
