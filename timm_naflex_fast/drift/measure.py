"""Run a model under each strategy on the same batches and compare with unpatched timm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..flags import POS_EMBED
from ..patch import enable


@dataclass(frozen=True)
class Drift:
    """One strategy's distance from unpatched timm; zero all round is timm's own result.

    Attributes:
        embed_max_abs: largest absolute difference of the embedded tokens (valid ones), in the embeddings' units.
        embed_rel_rms: root mean square of that difference over that of timm's embeddings.
        pooled_cosine_distance: 1 - cosine of the pooled outputs, mean over images.
        agreement: share of images with timm's predicted class; without a classifier, with timm's nearest neighbour.
        accuracy: share of right predictions; None without labels.
    """

    embed_max_abs: float
    embed_rel_rms: float
    pooled_cosine_distance: float
    agreement: float
    accuracy: float | None


class _Seen:
    """What one strategy made of the batches so far. Embeddings are compared at once: a folder's would not fit."""

    def __init__(self) -> None:
        self.largest = self.squared = self.total = 0.0
        self.pooled: list[Tensor] = []
        self.classes: list[Tensor] = []

    def compare(self, ours: Tensor, stock: Tensor) -> None:
        """Take in the embeddings (T, C) of one batch, beside timm's."""
        difference = (ours - stock).double()
        self.largest = max(self.largest, difference.abs().max().item())
        self.squared += difference.square().sum().item()
        self.total += stock.double().square().sum().item()


def measure(
    model: nn.Module,
    batches: Iterable[tuple[dict[str, Tensor], Tensor | None]],
    strategies: Iterable[str] = POS_EMBED,
) -> tuple[int, dict[str, Drift]]:
    """Drift of each strategy from timm's own result, ``"stock"`` among them.

    Args:
        model: a timm NaFlexVit.
        batches: (input dict of timm's NaFlex collator, labels (B,) or None); read once.
        strategies: names for ``enable(pos_embed=...)``; "stock" is always measured.

    Returns:
        The number of images, and the drift per strategy, stock first.

    Raises:
        ValueError: no images, or an unknown strategy.
    """
    names = ["stock", *(name for name in strategies if name != "stock")]
    seen = {name: _Seen() for name in names}
    labels: list[Tensor | None] = []
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for inputs, targets in batches:
                labels.append(targets)
                for name in names:
                    with enable(mode="stock", pos_embed=name, model=model):
                        embedded, pooled, classes = _forward(model, inputs)
                    if name == "stock":
                        reference = embedded
                    seen[name].compare(embedded, reference)
                    seen[name].pooled.append(pooled)
                    if classes is not None:
                        seen[name].classes.append(classes)
    finally:
        model.train(was_training)
    if not labels:
        raise ValueError("there is no image to measure on")
    right = None if any(targets is None for targets in labels) else torch.cat(labels)  # type: ignore[arg-type]
    return len(torch.cat(seen["stock"].pooled)), {name: _drift(seen[name], seen["stock"], right) for name in names}


def _forward(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Embeddings of the valid tokens (T, C), pooled output (B, D), predicted classes (B,) or None."""
    caught = []
    hook = model.embeds.register_forward_hook(
        lambda _, args, out: caught.append(out[0] if isinstance(out, tuple) else out)
    )
    try:
        keys = ("patches", "patch_coord", "patch_valid")
        features = model.forward_features(*(inputs[key] for key in keys))
    finally:
        hook.remove()
    valid = inputs["patch_valid"]
    if isinstance(features, dict):
        features, valid = features["patches"], features["patch_valid"]
    pooled = model.forward_head(features, patch_valid=valid, pre_logits=True)
    logits = model.forward_head(features, patch_valid=valid) if model.num_classes else None
    prefix = caught[0].shape[1] - inputs["patch_valid"].shape[1]
    embedded = caught[0][:, prefix:][inputs["patch_valid"]]
    return embedded.float(), pooled.float(), None if logits is None else logits.argmax(-1)


def _answers(seen: _Seen) -> Tensor:
    """Per image the predicted class; without a classifier, the most similar other image."""
    if seen.classes:
        return torch.cat(seen.classes)
    directions = F.normalize(torch.cat(seen.pooled), dim=-1)
    return (directions @ directions.t()).fill_diagonal_(-2).argmax(-1)


def _drift(ours: _Seen, stock: _Seen, labels: Tensor | None) -> Drift:
    a, b = (F.normalize(torch.cat(seen.pooled).double(), dim=-1) for seen in (ours, stock))
    answers = _answers(ours)
    return Drift(
        embed_max_abs=ours.largest,
        embed_rel_rms=(ours.squared / ours.total) ** 0.5 if ours.total else 0.0,
        # |a - b|^2 / 2 of unit vectors is 1 - cosine without the cancellation that hides small angles.
        pooled_cosine_distance=((a - b).square().sum(-1) / 2).mean().item(),
        agreement=(answers == _answers(stock)).double().mean().item(),
        accuracy=None if labels is None else (answers == labels).double().mean().item(),
    )
