"""Run a model under each contender on the same batches, and compare with the baseline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...patching.modes import POS_EMBED
from .maps import Picture, picture, wanted
from .metrics import Difference, agreement, cosine_distance, nearest
from .peers import left_out, standing_in

Grid = tuple[int, int]


@dataclass(frozen=True)
class Drift:
    """One contender's distance from the baseline; zero all round is the baseline's own result.

    Attributes:
        embed_max_abs: largest absolute difference of the embedded tokens (valid ones), in the embeddings' units.
        embed_rel_rms: root mean square of that difference over that of the baseline's embeddings.
        pooled_cosine_distance: 1 - cosine of the pooled outputs, mean over images.
        neighbours: share of images whose nearest other image (by pooled output) is the baseline's.
        agreement: share of images with the baseline's predicted class; without a classifier, as ``neighbours``.
        accuracy: share of right predictions; None without labels.
    """

    embed_max_abs: float
    embed_rel_rms: float
    pooled_cosine_distance: float
    neighbours: float
    agreement: float
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
        pooled_cosine_distance: per contender, mean over the images.
    """

    grid: Grid
    images: int
    aspect: float
    shrink: float
    embed_rel_rms: dict[str, float]
    pooled_cosine_distance: dict[str, float]


@dataclass(frozen=True)
class Survey:
    """All that was measured; each dictionary's keys are the contenders, the baseline first.

    Attributes:
        images: how many were measured.
        tolerance: an ``embed_max_abs`` up to this is rounding: 2e-6 times the table's largest value (1 at least), or
            the last bit of the largest embedding where that is more.
        blocks: relative RMS of the patch tokens after each block.
    """

    images: int
    baseline: str
    tolerance: float
    drift: dict[str, Drift]
    blocks: dict[str, list[float]]
    grids: list[GridDrift]
    left_out: dict[str, str]
    pictures: list[Picture] = field(default_factory=list)

    def exact(self, name: str) -> bool:
        """Whether a contender is the baseline but for rounding."""
        return self.drift[name].embed_max_abs <= self.tolerance


@dataclass
class _Outputs:
    """One forward pass: tokens (B, N, C) after embedding and after each block, pooled (B, D), classes (B,) or None."""

    embedded: Tensor
    blocks: list[Tensor]
    pooled: Tensor
    classes: Tensor | None


class _Seen:
    """What one contender made of the batches so far. Tokens are compared at once: a folder's would not fit."""

    def __init__(self, depth: int) -> None:
        self.embedded = Difference()
        self.blocks = [Difference() for _ in range(depth)]
        self.grids: dict[Grid, Difference] = {}
        self.pooled: list[Tensor] = []
        self.classes: list[Tensor] = []

    def take(self, ours: _Outputs, baseline: _Outputs, valid: Tensor, grids: list[Grid]) -> None:
        self.embedded.add(ours.embedded[valid], baseline.embedded[valid])
        for difference, a, b in zip(self.blocks, ours.blocks, baseline.blocks):
            difference.add(a[valid], b[valid])
        for grid in set(grids):
            there = torch.tensor([other == grid for other in grids], device=valid.device)
            mine = valid[there]
            difference = self.grids.setdefault(grid, Difference())
            difference.add(ours.embedded[there][mine], baseline.embedded[there][mine])
        self.pooled.append(ours.pooled.float())
        if ours.classes is not None:
            self.classes.append(ours.classes)


def survey(
    model: nn.Module,
    batches: Iterable[tuple[dict[str, Any], Tensor | None]],
    contenders: Iterable[str] = POS_EMBED,
    *,
    baseline: str = "stock",
    pictures: int = 0,
) -> Survey:
    """Drift of each contender from the baseline, on the model's device and in its dtype (no autocast).

    Args:
        model: a timm NaFlexVit.
        batches: (input dict of timm's NaFlex collator, labels (B,) or None); read once. The dict may hold "names", a
            list of B strings.
        contenders: names of strategies and of ``peers.PEERS``; those that this model cannot run are left out.
        baseline: what the others are compared with; always measured.
        pictures: how many images to keep with a map of drift over their patches, of aspect ratios far apart.

    Raises:
        ValueError: no images, or an unknown name.
    """
    embeds: Any = model.embeds
    reasons = {name: left_out(name, embeds) for name in dict.fromkeys([baseline, *contenders])}
    if reasons[baseline] is not None:
        raise ValueError(f"{baseline!r} cannot be the baseline: {reasons[baseline]}")
    names = [name for name, why in reasons.items() if why is None]
    parameter = next(model.parameters())
    seen = {name: _Seen(len(model.blocks)) for name in names}  # type: ignore[arg-type]
    labels: list[Tensor | None] = []
    grids: list[Grid] = []
    called: list[str] = []
    kept: list[Picture] = []
    largest = 0.0
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for inputs, targets in batches:
                batch = {key: inputs[key].to(parameter.device) for key in ("patches", "patch_coord", "patch_valid")}
                batch["patches"] = batch["patches"].to(parameter.dtype)
                valid = batch["patch_valid"]
                sizes = [(h, w) for h, w in (batch["patch_coord"].amax(1) + 1).long().tolist()]
                maps: dict[str, Tensor] = {}
                for name in names:
                    with standing_in(name, model):
                        outputs = _forward(model, batch)
                    if name == baseline:
                        reference = outputs
                        largest = max(largest, outputs.embedded[valid].abs().max().item())
                    seen[name].take(outputs, reference, valid, sizes)
                    maps[name] = (outputs.embedded.float() - reference.embedded.float()).norm(dim=-1)
                start = len(grids)
                labels.append(targets)
                grids += sizes
                called += inputs.get("names") or [f"image {start + i + 1}" for i in range(len(sizes))]
                if pictures:
                    scale = reference.embedded.float()[valid].norm(dim=-1).square().mean().sqrt()
                    kept += [
                        picture(called[start + i], batch, i, {k: v[i] / scale for k, v in maps.items()}, model)
                        for i in wanted([p.grid for p in kept], sizes, pictures)
                    ]
    finally:
        model.train(was_training)
    if not grids:
        raise ValueError("there is no image to measure on")
    cosines = {
        name: cosine_distance(torch.cat(one.pooled), torch.cat(seen[baseline].pooled)).cpu()
        for name, one in seen.items()
    }
    return Survey(
        images=len(grids),
        baseline=baseline,
        tolerance=_tolerance(embeds, largest, parameter.dtype),
        drift=_drifts(seen, baseline, cosines, called, labels),
        blocks={name: [block.rel_rms for block in one.blocks] for name, one in seen.items()},
        grids=_by_grid(grids, seen, cosines, _table_size(embeds)),
        left_out={name: why for name, why in reasons.items() if why is not None},
        pictures=kept,
    )


def measure(
    model: nn.Module,
    batches: Iterable[tuple[dict[str, Any], Tensor | None]],
    strategies: Iterable[str] = POS_EMBED,
) -> tuple[int, dict[str, Drift]]:
    """The number of images and each strategy's drift from unpatched timm, "stock" first; see :func:`survey`."""
    found = survey(model, batches, strategies)
    return found.images, found.drift


def _forward(model: Any, inputs: dict[str, Tensor]) -> _Outputs:
    length = inputs["patch_coord"].shape[1]
    caught: list[Tensor] = []

    def catch(_: nn.Module, args: Any, out: Any) -> None:
        tokens = out[0] if isinstance(out, tuple) else out
        caught.append(tokens[:, tokens.shape[1] - length :])

    hooks = [module.register_forward_hook(catch) for module in (model.embeds, *model.blocks)]
    try:
        features = model.forward_features(inputs["patches"], inputs["patch_coord"], inputs["patch_valid"])
    finally:
        for hook in hooks:
            hook.remove()
    valid = inputs["patch_valid"]
    if isinstance(features, dict):
        features, valid = features["patches"], features["patch_valid"]
    pooled = model.forward_head(features, patch_valid=valid, pre_logits=True)
    logits = model.forward_head(features, patch_valid=valid) if model.num_classes else None
    return _Outputs(caught[0], caught[1:], pooled, None if logits is None else logits.argmax(-1))


def _drifts(
    seen: dict[str, _Seen], baseline: str, cosines: dict[str, Tensor], called: list[str], labels: list[Tensor | None]
) -> dict[str, Drift]:
    right = None if any(targets is None for targets in labels) else torch.cat(labels)  # type: ignore[arg-type]
    closest = {name: nearest(torch.cat(one.pooled), called) for name, one in seen.items()}
    found = {}
    for name, one in seen.items():
        neighbours = agreement(closest[name], closest[baseline])
        classes = torch.cat(one.classes).cpu() if one.classes else None
        found[name] = Drift(
            embed_max_abs=one.embedded.max_abs,
            embed_rel_rms=one.embedded.rel_rms,
            pooled_cosine_distance=cosines[name].mean().item(),
            neighbours=neighbours,
            agreement=neighbours if classes is None else agreement(classes, torch.cat(seen[baseline].classes).cpu()),
            accuracy=None if right is None or classes is None else agreement(classes, right.cpu()),
        )
    return found


def _by_grid(
    grids: list[Grid], seen: dict[str, _Seen], cosines: dict[str, Tensor], table: Grid | None
) -> list[GridDrift]:
    """One record per distinct grid, in order of aspect and then of size."""
    places: dict[Grid, list[int]] = {}
    for place, grid in enumerate(grids):
        places.setdefault(grid, []).append(place)
    records = []
    for (h, w), where in sorted(places.items(), key=lambda item: (item[0][1] / item[0][0], item[0])):
        records.append(
            GridDrift(
                grid=(h, w),
                images=len(where),
                aspect=w / h,
                shrink=max(table[0] / h, table[1] / w) if table else 1.0,
                embed_rel_rms={name: one.grids[h, w].rel_rms for name, one in seen.items()},
                pooled_cosine_distance={name: values[where].mean().item() for name, values in cosines.items()},
            )
        )
    return records


def _tables(embeds: Any) -> list[Tensor]:
    found = (getattr(embeds, name, None) for name in ("pos_embed", "pos_embed_y", "pos_embed_x"))
    return [table for table in found if table is not None]


def _table_size(embeds: Any) -> Grid | None:
    """Cells (H0, W0) of the position table; None without one."""
    sizes = [n for table in _tables(embeds) for n in table.shape[1:-1]]
    return (sizes[0], sizes[1]) if sizes else None


def _tolerance(embeds: Any, largest: float, dtype: torch.dtype) -> float:
    values = [table.detach().abs().max().item() for table in _tables(embeds)]
    return max(2e-6 * max(1.0, *values, 0.0), torch.finfo(dtype).eps * largest)
