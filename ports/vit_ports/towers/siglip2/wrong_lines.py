"""What the wrong lines of ``mistakes.diff`` call, beside what the port in NumPy has itself.

Tests: ports/tests/test_mistakes.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...format import Array

Weights = Mapping[str, Array]  # under transformers' names


def by_torch(numbers: Any, size: Sequence[int] | None, **options: Any) -> Array:
    """Numbers (H, W, C) resized to (h, w) by ``F.interpolate`` with these options.

    Nothing is rounded, and nothing cut at black and white.
    """
    import torch
    from torch.nn import functional as F

    tensor = torch.tensor(np.float32(numbers))
    channels = tensor.permute(2, 0, 1)  # (C, H, W)
    batch = F.interpolate(channels[None], size, **options)  # (1, C, h, w)
    rows = batch[0].permute(1, 2, 0)  # (h, w, C)
    return rows.numpy()


def changed(weights: Weights, change: Callable[[Array], Array], ends: tuple[str, ...]) -> Weights:
    """Weights of which those are changed whose names end so."""
    found = dict(weights)
    for name, numbers in weights.items():
        if name.endswith(ends):
            found[name] = change(numbers)
    return found


def without(weights: Weights, *ends: str) -> Weights:
    """Weights with zeros in those whose names end so."""
    return changed(weights, np.zeros_like, ends)


def reread(weights: Weights, *ends: str) -> Weights:
    """Weights whose kernels (outputs, inputs) are read as (inputs, outputs): squares transposed."""

    def read(kernel: Array) -> Array:
        return kernel.reshape(kernel.shape[::-1]).T

    return changed(weights, read, ends)


def padded(x: Array, weights: Weights, length: int, position: Any = 0) -> Array:
    """Tokens (N, C) and padding behind them, ``length`` in all: patches of zeros, with a position."""
    # The kernel makes nothing of a patch of zeros: its bias remains.
    bias = weights["embeddings.patch_embedding.bias"]
    shape = (length - len(x), x.shape[1])
    padding = np.broadcast_to(bias + position, shape)
    return np.concatenate([x, padding])
