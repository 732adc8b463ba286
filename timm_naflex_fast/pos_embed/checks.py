"""Checks of arguments. Their errors say what is valid.

``tests/test_functional.py`` meets each of these errors.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..tracing import is_dtensor


def check_numbers(tensor: Any, name: str) -> None:
    """Refuse what is no tensor of real numbers, each of which has a place in memory of its own."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor of real numbers; got {type(tensor).__name__}")
    if is_dtensor(tensor):
        raise ValueError(f"{name} is a DTensor; give {name}.to_local() or {name}.full_tensor()")
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    if not is_dense or tensor.is_quantized or tensor.is_complex():
        raise ValueError(
            f"{name} must be a dense tensor of real numbers, neither nested nor quantized; "
            f"got {tensor.dtype} in the layout {tensor.layout}"
        )


def check_size(size: Sequence[int]) -> tuple[int, int]:
    """``size`` as (h, w), Python's integers of at least 1; NumPy's are taken too."""
    try:
        h, w = map(operator.index, size)
    except (TypeError, ValueError):
        h = w = 0
    if min(h, w) < 1:
        raise ValueError(f"size must be two integers of at least 1; got {size!r}")
    return h, w
