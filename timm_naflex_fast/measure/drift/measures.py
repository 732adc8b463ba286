"""The measures of drift, in float64. No drift is a difference of 0, or a share of 1."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .rounding import FLOAT32


def relative_rms(squared: Tensor, reference: Tensor) -> float:
    """Root of the sum of squared differences over that of the reference's squares."""
    return (squared.sum() / reference.sum()).sqrt().item()


def cosine_distance(ours: Tensor, reference: Tensor) -> Tensor:
    """1 - cosine between the rows of two (N, D) tensors: (N,) float64, exactly 0 for equal rows."""
    a = F.normalize(ours.double(), dim=-1)
    b = F.normalize(reference.double(), dim=-1)
    # |a - b|^2 / 2 of unit vectors is 1 - cosine without the cancellation that hides small angles.
    return (a - b).square().sum(-1) / 2


def agreement(ours: Tensor, reference: Tensor) -> float:
    """Share of equal entries of two (N,) tensors."""
    return (ours == reference).double().mean().item()


def nearest(rows: Tensor) -> Tensor:
    """Index (N,) of the other row that is most similar to each of (N, D), the first of equals."""
    directions = F.normalize(rows.double(), dim=-1)
    found = []
    # The whole similarity matrix of a large folder may not fit into memory.
    for start in range(0, len(rows), 1024):
        similar = directions[start : start + 1024] @ directions.t()
        similar[:, start:].fill_diagonal_(-2)  # an image is no neighbour of itself
        found.append(similar.argmax(-1))
    return torch.cat(found)


# A choice is the index of a largest number, and where two are as large, rounding decides: copies of
# a picture are each as near as the other. So timm's result itself says what counts as equal.


def precision(dtype: torch.dtype) -> float:
    """How exactly a model of this dtype gives its output, as a share of the output's length."""
    return FLOAT32 + torch.finfo(dtype).eps


def same_nearest(ours: Tensor, timms: Tensor, dtype: torch.dtype) -> float:
    """Share of rows whose nearest other row is timm's own, or as near in timm's result.

    As near: timm's outputs, scaled to length 1, lie no farther away than those of timm's own
    choice, but for :func:`precision`.

    Args:
        ours: (N, D) outputs of a contender.
        timms: (N, D) timm's own.
        dtype: that of the model that computed them.
    """
    directions = F.normalize(timms.double(), dim=-1)
    chosen = (directions - directions[nearest(ours)]).norm(dim=-1)  # (N,)
    best = (directions - directions[nearest(timms)]).norm(dim=-1)
    return (chosen - best <= precision(dtype)).double().mean().item()


def classes(ours: Tensor, timms: Tensor) -> Tensor:
    """The classes (B,) that a contender predicts; timm's own where timm's logits are as large.

    As large: timm's logit of the contender's class is its largest but for the :func:`precision` of
    both, as shares of the row's largest absolute value.

    Args:
        ours: (B, classes) logits of a contender, in the model's dtype.
        timms: (B, classes) timm's own.
    """
    chosen = ours.argmax(-1)  # (B,)
    best = timms.argmax(-1)
    logits = timms.double()
    lost = logits.amax(-1) - logits.gather(1, chosen[:, None])[:, 0]
    limit = 2 * precision(timms.dtype) * logits.abs().amax(-1)
    return torch.where(lost <= limit, best, chosen)
