"""Run a model under each contender on the same batches, and compare what comes out with timm's own result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..contenders import BASELINE, OURS, missing, use
from .metrics import agreement, cosine_distance, nearest, relative_rms
from .pictures import SHOWN, Picture, picture

Grid = tuple[int, int]


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
        shrink: table cells per patch, along the axis where there are more of them; above 1 the table is downsampled.
        embed_rel_rms: per contender.
    """

    grid: Grid
    images: int
    shrink: float
    embed_rel_rms: dict[str, float]


@dataclass(frozen=True)
class Survey:
    """All that was measured; each dictionary's keys are the contenders, stock first.

    Attributes:
        images: how many were measured.
        tolerance: an ``embed_max_abs`` up to this is rounding: 2e-6 times the table's largest value (1 at least), or
            the last bit of the largest embedding where that is more.
        left_out: contenders that this model cannot run, each with the reason.
    """

    images: int
    tolerance: float
    drift: dict[str, Drift]
    grids: list[GridDrift]
    left_out: dict[str, str]
    pictures: list[Picture]

    def exact(self, name: str) -> bool:
        """Whether a contender is timm's own result but for rounding."""
        return self.drift[name].embed_max_abs <= self.tolerance


def survey(
    model: Any,
    batches: Iterable[tuple[dict[str, Any], Tensor | None]],
    contenders: Iterable[str] = OURS,
    pictures: int = 0,
    after_pass: Callable[[], None] = lambda: None,
) -> Survey:
    """Drift of each contender from timm's own result, on the model's device and in its dtype (no autocast).

    Args:
        model: a timm NaFlexVit in eval mode.
        batches: (input dict of timm's NaFlex collator, labels (B,) or None); read once. The dict may hold "names", a
            list of B strings.
        contenders: names out of ``contenders.NAMES``; those that this model cannot run are left out.
        pictures: how many images to keep with a map of drift over their patches, each of another grid.
        after_pass: called after each contender's pass over each batch.

    Raises:
        ValueError: no images.
    """
    embeds, parameter = model.embeds, next(model.parameters())
    reasons = {name: missing(name, embeds) for name in dict.fromkeys([BASELINE, *contenders])}
    passes: dict[str, list[dict[str, Tensor]]] = {name: [] for name, why in reasons.items() if why is None}
    labels: list[Tensor] = []
    grids: list[Grid] = []
    kept: dict[Grid, Picture] = {}
    for inputs, targets in batches:
        batch = {key: inputs[key].to(parameter.device) for key in ("patches", "patch_coord", "patch_valid")}
        batch["patches"] = batch["patches"].to(parameter.dtype)
        maps: dict[str, Tensor] = {}
        for name, found in passes.items():
            with use(name, model), torch.inference_mode():
                tokens, results = _forward(model, batch)
            if name == BASELINE:
                timms = tokens
            squares = (tokens - timms).square().sum(-1)  # (B, N)
            if name in SHOWN:
                maps[name] = (squares / timms[batch["patch_valid"]].square().sum(-1).mean()).sqrt()
            found.append({**results, "moved": squares.sum(1), "largest_move": (tokens - timms).abs().amax((1, 2))})
            after_pass()
        for i, (h, w) in enumerate((batch["patch_coord"].amax(1) + 1).long().tolist()):
            grids.append((h, w))
            if maps and len(kept) < pictures and (h, w) not in kept:
                name = inputs["names"][i] if "names" in inputs else f"image {len(grids)}"
                kept[h, w] = picture(name, batch, maps, i, embeds)
        labels += [] if targets is None else [targets.to(parameter.device)]
    if not grids:
        raise ValueError("there is no image to measure on")
    seen = {name: {key: torch.cat([one[key] for one in found]) for key in found[0]} for name, found in passes.items()}
    tables = [table for name, table in embeds.named_parameters() if name.startswith("pos_embed")]
    rounding = torch.finfo(parameter.dtype).eps * seen[BASELINE]["largest"].max().item()
    return Survey(
        images=len(grids),
        tolerance=max([2e-6, rounding, *(2e-6 * table.abs().max().item() for table in tables)]),
        drift={name: _drift(own, seen[BASELINE], labels) for name, own in seen.items()},
        grids=_by_grid(grids, seen, [n for table in tables for n in table.shape[1:-1]]),
        left_out={name: why for name, why in reasons.items() if why is not None},
        pictures=list(kept.values()),
    )


def _forward(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The embedded patch tokens (B, N, C) in float64, 0 for padding; and each image's results, B of each kind."""
    embedded: list[Any] = []
    with model.embeds.register_forward_hook(lambda module, args, out: embedded.append(out)):
        features = model.forward_features(inputs["patches"], inputs["patch_coord"], inputs["patch_valid"])
    valid = inputs["patch_valid"]
    tokens = embedded[0][0] if isinstance(embedded[0], tuple) else embedded[0]
    tokens = tokens[:, -valid.shape[1] :].double().masked_fill(~valid[..., None], 0)  # no class and register tokens
    results = {"squares": tokens.square().sum((1, 2)), "largest": tokens.abs().amax((1, 2))}
    if isinstance(features, dict):
        features, valid = features["patches"], features["patch_valid"]
    results["pooled"] = model.forward_head(features, patch_valid=valid, pre_logits=True).float()
    if model.num_classes:
        results["classes"] = model.forward_head(features, patch_valid=valid).argmax(-1)
    return tokens, results


def _drift(own: dict[str, Tensor], timms: dict[str, Tensor], labels: list[Tensor]) -> Drift:
    classes = own.get("classes")
    return Drift(
        embed_max_abs=own["largest_move"].max().item(),
        embed_rel_rms=relative_rms(own["moved"], timms["squares"]),
        pooled_cosine_distance=cosine_distance(own["pooled"], timms["pooled"]).mean().item(),
        neighbours=agreement(nearest(own["pooled"]), nearest(timms["pooled"])),
        agreement=None if classes is None else agreement(classes, timms["classes"]),
        accuracy=None if classes is None or not labels else agreement(classes, torch.cat(labels)),
    )


def _by_grid(grids: list[Grid], seen: dict[str, dict[str, Tensor]], cells: list[int]) -> list[GridDrift]:
    """One record per distinct grid, in order of aspect and then of size; ``cells``: (H0, W0), or empty."""
    found = []
    for grid in sorted(set(grids), key=lambda grid: (grid[1] / grid[0], grid)):
        where = [place for place, other in enumerate(grids) if other == grid]
        shrink = max((n / patches for n, patches in zip(cells, grid)), default=1.0)
        timms = seen[BASELINE]["squares"][where]
        drift = {name: relative_rms(own["moved"][where], timms) for name, own in seen.items()}
        found.append(GridDrift(grid, len(where), shrink, drift))
    return found
