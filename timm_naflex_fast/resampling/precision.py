"""Keeping float32 products float32: autocast would turn them into bf16, TF32 and its kin round the factors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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


class _Once(torch.autograd.Function):
    """Passes ``value`` on and refuses to be differentiated with respect to ``source``."""

    @staticmethod
    def forward(value: Tensor, source: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "timm_naflex_fast: the matmul strategy has no double backward with respect to its table; "
            'use enable(mode="interpolate_cached"), which PyTorch can differentiate twice'
        )


def once_differentiable(value: Tensor, source: Tensor) -> Tensor:
    """``value``, a gradient computed from ``source`` outside autograd; differentiating it again raises RuntimeError."""
    return _Once.apply(value, source) if torch.is_grad_enabled() and source.requires_grad else value
