"""The measures of drift, on plain tensors. All are computed in float64; zero (agreement: one) is no drift at all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class Difference:
    """Largest and relative root-mean-square difference from a reference, over tensors taken in one by one."""

    def __init__(self) -> None:
        self.max_abs = self._squared = self._total = 0.0

    def add(self, ours: Tensor, reference: Tensor) -> None:
        """Take in two tensors of one shape; empty ones change nothing."""
        if ours.shape != reference.shape:
            raise ValueError(f"shapes differ: {tuple(ours.shape)} and {tuple(reference.shape)}")
        if not ours.numel():
            return
        difference = ours.double() - reference.double()
        self.max_abs = max(self.max_abs, difference.abs().max().item())
        self._squared += difference.square().sum().item()
        self._total += reference.double().square().sum().item()

    @property
    def rel_rms(self) -> float:
        """Root mean square of the difference over that of the reference; infinite where only the reference is zero."""
        if not self._squared:
            return 0.0
        return (self._squared / self._total) ** 0.5 if self._total else float("inf")


def cosine_distance(ours: Tensor, reference: Tensor) -> Tensor:
    """1 - cosine between the rows of two (N, D) tensors: (N,) float64, exactly 0 for equal rows."""
    a, b = (F.normalize(rows.double(), dim=-1) for rows in (ours, reference))
    # |a - b|^2 / 2 of unit vectors is 1 - cosine without the cancellation that hides small angles.
    return (a - b).square().sum(-1) / 2


def nearest(rows: Tensor, names: Sequence[str] | None = None) -> Tensor:
    """Per row of (N, D) the index (N,) of the most similar other row by cosine, the first of equals.

    Args:
        rows: one embedding per image.
        names: rows of one name are the same image at another size, and no neighbours of each other.
    """
    numbers: dict[str, int] = {}
    same = torch.tensor([numbers.setdefault(name, len(numbers)) for name in names or map(str, range(len(rows)))])
    directions = F.normalize(rows.double(), dim=-1).cpu()
    found = []
    for start in range(0, len(rows), 1024):  # a folder's whole similarity matrix may not fit
        part = slice(start, start + 1024)
        similar = directions[part] @ directions.t()
        found.append(similar.masked_fill_(same[part, None] == same, -2).argmax(-1))
    return torch.cat(found) if found else same


def agreement(ours: Tensor, reference: Tensor) -> float:
    """Share of equal entries of two (N,) tensors."""
    return (ours == reference).double().mean().item()
