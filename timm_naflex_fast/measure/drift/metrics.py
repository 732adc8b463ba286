"""The measures of drift, on plain tensors. All are computed in float64; zero (agreement: one) is no drift at all."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def relative_rms(squared: Tensor, reference: Tensor) -> float:
    """Root of the summed squared differences over that of the reference's squares; infinite where only those are 0."""
    above, below = squared.sum().item(), reference.sum().item()
    if not above:
        return 0.0
    return (above / below) ** 0.5 if below else float("inf")


def cosine_distance(ours: Tensor, reference: Tensor) -> Tensor:
    """1 - cosine between the rows of two (N, D) tensors: (N,) float64, exactly 0 for equal rows."""
    a, b = (F.normalize(rows.double(), dim=-1) for rows in (ours, reference))
    # |a - b|^2 / 2 of unit vectors is 1 - cosine without the cancellation that hides small angles.
    return (a - b).square().sum(-1) / 2


def nearest(rows: Tensor) -> Tensor:
    """Per row of (N, D) the index (N,) of the most similar other row by cosine, the first of equals."""
    directions = F.normalize(rows.double(), dim=-1).cpu()
    found = []
    for start in range(0, len(rows), 1024):  # the whole similarity matrix of a large folder may not fit
        similar = directions[start : start + 1024] @ directions.t()
        similar[:, start:].fill_diagonal_(-2)  # an image is no neighbour of itself
        found.append(similar.argmax(-1))
    return torch.cat(found)


def agreement(ours: Tensor, reference: Tensor) -> float:
    """Share of equal entries of two (N,) tensors."""
    return (ours == reference).double().mean().item()
