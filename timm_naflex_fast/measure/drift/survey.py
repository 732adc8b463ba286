"""Run a model under each contender on the same batches, and compare what comes out with timm's own result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..contenders import BASELINE, OURS, check_names, missing, use
from .metrics import agreement, cosine_distance, nearest, relative_rms
from .pictures import Picture, picture, wanted

Grid = tuple[int, int]
Batches = Iterable[tuple[dict[str, Any], "Tensor | None"]]


@dataclass(frozen=True)
class Drift:
    """One contender's distance from timm's own result; all zero is that result itself.

    Attributes:
        embed_max_abs: largest absolute difference of the embedded tokens (valid ones), in the embeddings' units.
        embed_rel_rms: root mean square of that difference over that of timm's embeddings.
        pooled_cosine_distance: 1 - cosine of the pooled outputs, mean over images.
        neighbours: share of images whose nearest other image (by pooled output) is timm's.
        agreement: share of images with timm's predicted class; None for a model without classes.
        accuracy: share of right predictions; None without classes or labels.
    """

    embed_max_abs: float
    embed_rel_rms: float
    pooled_cosine_distance: float
    neighbours: float
    agreement: float | None
    accuracy: float | None


@dataclass(frozen=True)
class GridDrift:
    """The drift of the images that share one patch grid (h, w).

    Attributes:
        grid: patches along height and width.
        images: how many have it.
        aspect: width over height of the grid.
        shrink: table cells per patch, along the axis where there are more of them; above 1 the table is downsampled.
        embed_rel_rms: per contender.
    """

    grid: Grid
    images: int
    aspect: float
    shrink: float
    embed_rel_rms: dict[str, float]


@dataclass(frozen=True)
class Survey:
    """All that was measured; each dictionary's keys are the contenders, stock first.

    Attributes:
        images: how many were measured.
        tolerance: an ``embed_max_abs`` up to this is rounding: 2e-6 times the table's largest value (1 at least), or
            the last bit of the largest embedding where that is more.
        blocks: relative RMS of the patch tokens after each block.
        left_out: contenders that this model cannot run, each with the reason.
    """

    images: int
    tolerance: float
    drift: dict[str, Drift]
    blocks: dict[str, list[float]]
    grids: list[GridDrift]
    left_out: dict[str, str]
    pictures: list[Picture] = field(default_factory=list)

    def exact(self, name: str) -> bool:
        """Whether a contender is timm's own result but for rounding."""
        return self.drift[name].embed_max_abs <= self.tolerance


@dataclass
class _Seen:
    """What one contender made of the batches so far. Tokens are compared at once: all of them would not fit."""

    max_abs: float = 0.0
    squared: list[Tensor] = field(default_factory=list)  # per batch (1 + blocks, B): summed over an image's tokens
    pooled: list[Tensor] = field(default_factory=list)
    classes: list[Tensor] = field(default_factory=list)


def survey(
    model: Any,
    batches: Batches,
    contenders: Iterable[str] = OURS,
    *,
    pictures: int = 0,
    after_pass: Callable[[], None] = lambda: None,
) -> Survey:
    """Drift of each contender from timm's own result, on the model's device and in its dtype (no autocast).

    Args:
        model: a timm NaFlexVit.
        batches: (input dict of timm's NaFlex collator, labels (B,) or None); read once. The dict may hold "names", a
            list of B strings.
        contenders: names out of ``contenders.NAMES``; those that this model cannot run are left out.
        pictures: how many images to keep with a map of drift over their patches, of aspect ratios far apart.
        after_pass: called after each contender's pass over each batch.

    Raises:
        ValueError: no images, or an unknown name.
    """
    embeds = model.embeds
    reasons = {name: missing(name, embeds) for name in check_names([BASELINE, *contenders])}
    seen = {name: _Seen() for name, why in reasons.items() if why is None}
    parameter = next(model.parameters())
    total: list[Tensor] = []  # as _Seen.squared, of timm's own tokens
    labels: list[Tensor] = []
    grids: list[Grid] = []
    kept: list[Picture] = []
    largest = 0.0
    with _evaluating(model):
        for inputs, targets in batches:
            batch = {key: inputs[key].to(parameter.device) for key in ("patches", "patch_coord", "patch_valid")}
            batch["patches"] = batch["patches"].to(parameter.dtype)
            valid = batch["patch_valid"]
            maps: dict[str, Tensor] = {}
            for name, one in seen.items():
                with use(name, model):
                    stages, pooled, classes = _forward(model, batch)
                if name == BASELINE:
                    timms = stages
                    total.append(torch.stack([_squared(stage, valid).sum(1) for stage in stages]).cpu())
                    largest = max(largest, stages[0][valid].abs().max().item())
                gaps = [ours.double() - theirs.double() for ours, theirs in zip(stages, timms)]
                squared = [_squared(gap, valid) for gap in gaps]
                one.squared.append(torch.stack([tokens.sum(1) for tokens in squared]).cpu())
                one.max_abs = max(one.max_abs, gaps[0][valid].abs().max().item())
                one.pooled.append(pooled.float().cpu())
                one.classes += [] if classes is None else [classes.cpu()]
                maps[name] = squared[0].sqrt()
                after_pass()
            sizes = [(h, w) for h, w in (batch["patch_coord"].amax(1) + 1).long().tolist()]
            names = inputs.get("names") or [f"image {len(grids) + i + 1}" for i in range(len(sizes))]
            scale = (total[-1][0].sum() / valid.sum().cpu()).sqrt().to(valid.device)  # RMS length of a token
            for i in wanted([one.grid for one in kept], sizes, pictures):
                kept.append(picture(names[i], batch, i, {key: map_[i] / scale for key, map_ in maps.items()}, embeds))
            labels += [] if targets is None else [targets.cpu()]
            grids += sizes
    if not grids:
        raise ValueError("there is no image to measure on")
    sums = {name: torch.cat(one.squared, 1) for name, one in seen.items()}  # (1 + blocks, images)
    of_timm = torch.cat(total, 1)
    return Survey(
        images=len(grids),
        tolerance=_tolerance(embeds, largest, parameter.dtype),
        drift={name: _drift(one, seen[BASELINE], sums[name], of_timm, labels) for name, one in seen.items()},
        blocks={name: list(map(relative_rms, ours[1:], of_timm[1:])) for name, ours in sums.items()},
        grids=_by_grid(grids, sums, of_timm, _tables(embeds)),
        left_out={name: why for name, why in reasons.items() if why is not None},
        pictures=kept,
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        model.train(was_training)


def _forward(model: Any, inputs: dict[str, Tensor]) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """One pass: patch tokens (B, N, C) after the embedding and each block; pooled (B, D); classes (B,) or None."""
    length = inputs["patch_coord"].shape[1]
    stages: list[Tensor] = []

    def keep(_: nn.Module, args: Any, out: Any) -> None:
        tokens = out[0] if isinstance(out, tuple) else out
        stages.append(tokens[:, tokens.shape[1] - length :])  # without class and register tokens

    with ExitStack() as hooks:
        for module in (model.embeds, *model.blocks):
            hooks.enter_context(module.register_forward_hook(keep))
        features = model.forward_features(inputs["patches"], inputs["patch_coord"], inputs["patch_valid"])
    valid = inputs["patch_valid"]
    if isinstance(features, dict):
        features, valid = features["patches"], features["patch_valid"]
    pooled = model.forward_head(features, patch_valid=valid, pre_logits=True)
    return stages, pooled, model.forward_head(features, patch_valid=valid).argmax(-1) if model.num_classes else None


def _squared(tokens: Tensor, valid: Tensor) -> Tensor:
    """Per token (B, N) the squared length in float64; 0 for padding tokens."""
    return tokens.double().square().sum(-1).masked_fill(~valid, 0)


def _drift(one: _Seen, timms: _Seen, squared: Tensor, of_timm: Tensor, labels: list[Tensor]) -> Drift:
    pooled, timms_pooled = torch.cat(one.pooled), torch.cat(timms.pooled)
    classes = torch.cat(one.classes) if one.classes else None
    return Drift(
        embed_max_abs=one.max_abs,
        embed_rel_rms=relative_rms(squared[0], of_timm[0]),
        pooled_cosine_distance=cosine_distance(pooled, timms_pooled).mean().item(),
        neighbours=agreement(nearest(pooled), nearest(timms_pooled)),
        agreement=None if classes is None else agreement(classes, torch.cat(timms.classes)),
        accuracy=agreement(classes, torch.cat(labels)) if classes is not None and labels else None,
    )


def _by_grid(grids: list[Grid], sums: dict[str, Tensor], of_timm: Tensor, tables: list[Tensor]) -> list[GridDrift]:
    """One record per distinct grid, in order of aspect and then of size."""
    cells = [n for table in tables for n in table.shape[1:-1]]  # (H0, W0); empty without a table
    found = []
    for grid in sorted(set(grids), key=lambda grid: (grid[1] / grid[0], grid)):
        where = [place for place, other in enumerate(grids) if other == grid]
        shrink = max((n / patches for n, patches in zip(cells, grid)), default=1.0)
        drift = {name: relative_rms(ours[0, where], of_timm[0, where]) for name, ours in sums.items()}
        found.append(GridDrift(grid, len(where), grid[1] / grid[0], shrink, drift))
    return found


def _tables(embeds: Any) -> list[Tensor]:
    found = (getattr(embeds, name, None) for name in ("pos_embed", "pos_embed_y", "pos_embed_x"))
    return [table for table in found if table is not None]


def _tolerance(embeds: Any, largest: float, dtype: torch.dtype) -> float:
    values = [table.detach().abs().max().item() for table in _tables(embeds)]
    return max(2e-6 * max(1.0, *values, 0.0), torch.finfo(dtype).eps * largest)
