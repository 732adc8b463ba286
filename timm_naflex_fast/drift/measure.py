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


@dataclass
class _Seen:
    """What one strategy made of all batches."""

    embeddings: list[Tensor]
    pooled: Tensor
    answers: Tensor


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
    parts: dict[str, list[tuple[Tensor, Tensor, Tensor | None]]] = {name: [] for name in names}
    labels: list[Tensor | None] = []
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for inputs, targets in batches:
                labels.append(targets)
                for name in names:
                    with enable(mode="stock", pos_embed=name, model=model):
                        parts[name].append(_forward(model, inputs))
    finally:
        model.train(was_training)
    if not labels:
        raise ValueError("there is no image to measure on")
    answers = None if any(targets is None for targets in labels) else torch.cat(labels)  # type: ignore[arg-type]
    seen = {name: _join(part) for name, part in parts.items()}
    images = len(seen["stock"].answers)
    return images, {name: _compare(seen[name], seen["stock"], answers) for name in names}


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


def _join(parts: list[tuple[Tensor, Tensor, Tensor | None]]) -> _Seen:
    embeddings, pooled, classes = zip(*parts)
    vectors = torch.cat(pooled)
    if classes[0] is not None:
        return _Seen(list(embeddings), vectors, torch.cat(classes))
    likeness = F.normalize(vectors, dim=-1) @ F.normalize(vectors, dim=-1).t()
    return _Seen(list(embeddings), vectors, likeness.fill_diagonal_(-2).argmax(-1))


def _compare(ours: _Seen, stock: _Seen, labels: Tensor | None) -> Drift:
    largest = squared = total = 0.0
    for a, b in zip(ours.embeddings, stock.embeddings):
        difference = (a - b).double()
        largest = max(largest, difference.abs().max().item())
        squared += difference.square().sum().item()
        total += b.double().square().sum().item()
    a, b = ours.pooled.double(), stock.pooled.double()
    # |a/|a| - b/|b||^2 / 2 is 1 - cosine without the cancellation that hides small angles.
    distance = (F.normalize(a, dim=-1) - F.normalize(b, dim=-1)).square().sum(-1) / 2
    return Drift(
        embed_max_abs=largest,
        embed_rel_rms=(squared / total) ** 0.5 if total else 0.0,
        pooled_cosine_distance=distance.mean().item(),
        agreement=(ours.answers == stock.answers).double().mean().item(),
        accuracy=None if labels is None else (ours.answers == labels).double().mean().item(),
    )
