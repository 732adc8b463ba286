"""Products whose factors nothing rounds: neither autocast, nor TF32 where float64 can be had.

In this process, on a CPU and on CUDA, products that a flag could round are float64. Other devices
have no float64 (Apple's GPUs), or compute it slowly; nor have the runtimes of exported programs
(TensorRT, Core ML, WebGPU). There products are float32, with autocast off in the forward pass.

Tests: tests/behaviour/test_exports.py.
"""

import torch
from torch import Tensor

from ..tracing import is_exported


def has_float64(device: torch.device) -> bool:
    """Whether float64 may be used where the operations that follow will run."""
    return device.type in ("cpu", "cuda") and not is_exported()


def unrounded_dtype(table: Tensor) -> torch.dtype:
    """The dtype of products with a table that no flag rounds: float64, or float32 without it."""
    if table.dtype is torch.float64 or has_float64(table.device):
        return torch.float64
    return torch.float32


def is_autocast_on(device: torch.device) -> bool:
    """Whether autocast is on. PyTorch has none, and no answer, for meta, which computes shapes."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def unrounded_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, both of ``unrounded_dtype``."""
    # An exported program keeps the region without autocast: it may run under autocast.
    is_rounded = is_exported() or is_autocast_on(a.device)
    if a.dtype is torch.float64 or not is_rounded:
        return a @ b
    with torch.autocast(a.device.type, enabled=False):
        return a @ b
