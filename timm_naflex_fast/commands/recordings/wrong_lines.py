"""What the wrong lines of ``mistakes.diff`` call, beside what the port in NumPy has itself.

Tests: tests/commands/recordings/test_mistakes.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .format import Array

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
Weights = Mapping[str, Array]  # under transformers' names


def by_torch(numbers: Any, size: Sequence[int] | None, **options: Any) -> Array:
    """Numbers (H, W, C) resized to (h, w) by ``F.interpolate`` with these options.

    Nothing is rounded, and nothing cut at black and white.
    """
    import torch
    from torch.nn import functional as F

    array = np.array(numbers, np.float32)
    tensor = torch.from_numpy(array)
    channels = tensor.permute(2, 0, 1)  # (C, H, W)
    resized = F.interpolate(channels[None], size, **options)[0]  # (C, h, w)
    rows = resized.permute(1, 2, 0)  # (h, w, C)
    return rows.numpy()


def without(weights: Weights, *ends: str) -> dict[str, Array]:
    """Weights with zeros in those whose names end so."""
    changed = dict(weights)
    for name, numbers in weights.items():
        if name.endswith(ends):
            changed[name] = np.zeros_like(numbers)
    return changed


def reread(weights: Weights, *ends: str) -> dict[str, Array]:
    """Weights whose kernels (outputs, inputs) are read as (inputs, outputs): squares transposed."""
    changed = dict(weights)
    for name, numbers in weights.items():
        if name.endswith(ends):
            swapped = numbers.shape[::-1]
            misread = numbers.reshape(swapped)
            changed[name] = misread.T
    return changed


def padded(x: Array, weights: Weights, length: int, position: Any = 0) -> Array:
    """Tokens (N, C) and padding behind them, ``length`` in all: patches of zeros, with a position."""
    # The kernel makes nothing of a patch of zeros: its bias remains.
    bias = weights["embeddings.patch_embedding.bias"]
    zeros = np.zeros_like(x[:1])
    empty = bias + position + zeros  # (1, C)
    missing = length - len(x)
    padding = np.repeat(empty, missing, axis=0)
    return np.concatenate([x, padding])
