"""Run a model in each mode on the same batches, and compare with timm's own result."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....names import STRATEGY_NAMES
from ....patching.timm_methods import tables_of
from ..contenders import BASELINE, use
from ..output import progress
from ..pipelines import recorded

Batches = Iterable[tuple[dict[str, Any], Tensor | None]]
Tensors = dict[str, Tensor]
FLOAT32 = 2e-6
"""What sums in float32 may move a number by, as a share of the largest near it."""
TIE = 1e-5  # of cosine similarity
AT_ONCE = 1024  # images are compared with all others
MEANS = ("pooled_cosine_distance", "neighbours", "agreement", "accuracy")  # over images


@dataclass(frozen=True)
class Drift:
    """One mode's distance from timm's own result; all zero is that result itself.

    Attributes:
        embed_rel_rms: root mean square of the differences of the embedded tokens (valid ones) over
            that of timm's.
        embed_max_abs: their largest absolute difference, in the embeddings' units.
        embed_roundings: the largest difference, as a share of the largest number of its token or
            its channel (the smaller one), over what rounding moves; up to 1 nothing but rounding
            differs.
        pooled_cosine_distance: 1 - cosine of the outputs, mean over images; over the tokens of all
            images for a model that pools nothing.
        neighbours: share of images whose nearest other image is timm's; None for a model that pools
            nothing, and for fewer than three images, where there is no choice.
        agreement: share of images with timm's predicted class; None for a model without classes.
        accuracy: share of right predictions; None without classes or labels.
    """

    embed_rel_rms: float
    embed_max_abs: float
    embed_roundings: float
    pooled_cosine_distance: float
    neighbours: float | None = None
    agreement: float | None = None
    accuracy: float | None = None


@dataclass(frozen=True)
class GridDrift:
    """What was measured on the images of one patch grid.

    Attributes:
        grid: rows and columns.
        images: how many.
        shrink: table cells per patch, along the axis where there are more.
        embed_rel_rms: as in :class:`Drift`, by mode.
        resampled: whether it is another grid than the table's own.
    """

    grid: tuple[int, int]
    images: int
    shrink: float
    embed_rel_rms: dict[str, float]
    resampled: bool = True


@dataclass(frozen=True)
class Survey:
    """All that was measured; each dictionary's keys are the modes, stock first.

    Attributes:
        images: how many were measured.
        drift: of each mode.
        grids: one entry for each patch grid.
    """

    images: int
    drift: dict[str, Drift]
    grids: list[GridDrift]

    def exact(self, name: str) -> bool:
        """Whether a mode gives timm's own result but for rounding."""
        return self.drift[name].embed_roundings <= 1

    def unknown(self, name: str) -> str | None:
        """Why these images cannot tell that a mode is exact on others too, or None."""
        if not any(grid.resampled for grid in self.grids):
            return "every image has the table's own grid, so nothing was resampled"
        # Two ways of enlarging a table can be the same; antialiasing shows where one is shrunk.
        if name == "grid_sample" and not any(grid.shrink > 1 for grid in self.grids):
            return "no image has a grid smaller than the table, where it does not antialias"
        return None


def survey(
    model: Any,
    batches: Batches,
    modes: Iterable[str] = STRATEGY_NAMES,
) -> Survey:
    """Drift of each mode from timm's own result, on the CPU and in the model's dtype.

    Args:
        model: a timm NaFlexVit in eval mode.
        batches: (input dict of timm's NaFlex collator, labels (B,) or None).
        modes: names out of ``CONTENDERS``; timm's own settings are left out for factorized tables,
            which they do not resample.

    Raises:
        ValueError: no position table; or infinity or NaN in what the model computes.
    """
    tables = tables_of(model.embeds)
    if tables is None:
        raise ValueError(
            "the model has no position table, learned or factorized: nothing is resampled"
        )
    names = [*dict.fromkeys([BASELINE, *modes])]  # each once
    if model.embeds.pos_embed_type != "learned":
        names = [name for name in names if not name.startswith("timm-flag-")]
    results = _run_all(model, batches, names)
    timms = results[BASELINE]
    drift = {name: _drift(ours, timms) for name, ours in results.items()}
    return Survey(len(timms["grid"]), drift, _by_grid(tables.size, results))


def _run_all(model: Any, batches: Batches, names: Sequence[str]) -> dict[str, Tensors]:
    """The results of each mode, a tensor (N, ...) of each kind for N images; timm's own is first."""
    rounding = FLOAT32 + torch.finfo(next(model.parameters()).dtype).eps
    parts: dict[str, list[Tensors]] = {name: [] for name in names}
    for batch, labels in progress("measuring", batches):
        outputs: dict[str, Tensors] = {}
        for name in names:
            outputs[name] = _forward(model, batch, name)
            found = _compare(outputs[name], outputs[BASELINE], rounding)
            found["grid"] = batch["patch_coord"].amax(1).long() + 1  # (B, 2)
            if labels is not None and "classes" in found:
                found["accuracy"] = found["classes"] == labels
            parts[name].append(found)
    return {name: _joined(some) for name, some in parts.items()}


def _joined(parts: Sequence[Tensors]) -> Tensors:
    """The results of all batches."""
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def _forward(model: Any, inputs: dict[str, Any], mode: str) -> Tensors:
    """What the model computes for a batch in this mode.

    Its embedded tokens (B, N, C) and its output (B, D), in float64; of a model that pools nothing
    the last tokens (B, N, C), 0 for padding. And the predicted classes (B,), if it has some.

    Raises:
        ValueError: infinity or NaN in one of them.
    """
    valid = inputs["patch_valid"]
    dtype = next(model.parameters()).dtype
    watched = recorded({"tokens": model.embeds, "output": model.head_drop})
    with watched as inside, use(mode, model), torch.inference_mode():
        logits = model(inputs["patches"].to(dtype), inputs["patch_coord"], valid)

    found = {"tokens": _of_patches(inside["tokens"], valid), "output": inside["output"].double()}
    if inside["output"].ndim == 3:
        found["output"] = _of_patches(inside["output"], valid)
    elif model.num_classes:
        found["logits"] = logits
        found["classes"] = logits.argmax(-1)
    for what, values in found.items():
        if not values.isfinite().all():
            raise ValueError(f"with {mode}, the model's {what} hold infinity or NaN in {dtype}")
    return found


def _of_patches(tokens: Tensor, valid: Tensor) -> Tensor:
    """Tokens without those of class and registers, in float64, 0 for padding: (B, N, C)."""
    own = tokens[:, -valid.shape[1] :].double()
    return own.masked_fill(~valid[..., None], 0)


def _compare(ours: Tensors, timms: Tensors, rounding: float) -> Tensors:
    """What is kept of a batch: for each image its figures, (B,) of each kind.

    Args:
        ours: what the model computed in a mode.
        timms: timm's own.
        rounding: what it may move a number by, as a share.

    Returns:
        Figures of :class:`Drift` by their names; ``squares`` (B, 2), the sums of the squared
        differences and of timm's squared tokens; of a model that pools, ``directions`` (B, D), its
        outputs scaled to length 1; and the predicted ``classes``, if it has some.
    """
    tokens = timms["tokens"]  # (B, N, C), 0 for padding
    moves = ours["tokens"] - tokens
    # An outlier of one token, or of one channel, excuses nothing elsewhere.
    sizes = tokens.abs()
    scale = torch.minimum(sizes.amax(-1, keepdim=True), sizes.amax((0, 1)))  # (B, N, C)
    shares = moves.abs() / scale.clamp(min=1e-30)
    directions = F.normalize(ours["output"].flatten(1), dim=-1)
    turns = directions - F.normalize(timms["output"].flatten(1), dim=-1)
    results = {
        "squares": torch.stack([moves, tokens], 1).square().sum((2, 3)),
        "embed_max_abs": moves.abs().amax((1, 2)),
        "embed_roundings": shares.amax((1, 2)) / rounding,
        # 1 - cosine, without the cancellation that hides small angles.
        "pooled_cosine_distance": turns.square().sum(-1) / 2,
    }
    if ours["output"].ndim == 2:
        results["directions"] = directions
    if "classes" in ours:
        results["classes"] = ours["classes"]
        results["agreement"] = ours["classes"] == timms["classes"]
    return results


def _drift(ours: Tensors, timms: Tensors) -> Drift:
    """The figures of all images."""
    if "directions" in ours and len(ours["directions"]) > 2:
        ours["neighbours"] = same_nearest(ours["directions"], timms["directions"])
    means = {key: ours[key].double().mean().item() for key in MEANS if key in ours}
    return Drift(
        embed_rel_rms=_relative_rms(ours["squares"]),
        embed_max_abs=ours["embed_max_abs"].max().item(),
        embed_roundings=ours["embed_roundings"].max().item(),
        **means,
    )


def same_nearest(ours: Tensor, timms: Tensor) -> Tensor:
    """Whether the nearest other image of each (N,) is timm's, or as near: by timm's own similarity,
    within ``TIE`` of timm's best.

    Args:
        ours: (N, D) outputs of length 1.
        timms: (N, D) timm's own.
    """
    same = []
    # The whole similarity matrix of a large folder may not fit into memory.
    for rows in torch.arange(len(timms)).split(AT_ONCE):
        found = _similarities(ours, rows).argmax(-1, keepdim=True)  # (R, 1)
        similar = _similarities(timms, rows)  # (R, N)
        lost = similar.amax(-1) - similar.gather(1, found)[:, 0]
        same.append(lost <= TIE)
    return torch.cat(same)


def _similarities(directions: Tensor, rows: Tensor) -> Tensor:
    """Cosines (R, N) between some images and all; an image is no neighbour of itself."""
    similar = directions[rows] @ directions.t()
    return similar.scatter(1, rows[:, None], -2)


def _relative_rms(squares: Tensor) -> float:
    """Root of the sum of squared differences over that of timm's squared tokens, of (N, 2)."""
    moved, timms = squares.sum(0)
    return (moved / timms).sqrt().item()


def _by_grid(table_size: Sequence[int], results: dict[str, Tensors]) -> list[GridDrift]:
    """``Survey.grids``."""
    grids = results[BASELINE]["grid"]  # (N, 2)
    found = []
    for grid in grids.unique(dim=0):
        here = (grids == grid).all(1)
        height, width = grid.tolist()
        off = {name: _relative_rms(one["squares"][here]) for name, one in results.items()}
        about = GridDrift(
            grid=(height, width),
            images=int(here.sum()),
            shrink=max(table_size[0] / height, table_size[1] / width),
            embed_rel_rms=off,
            resampled=[height, width] != list(table_size),
        )
        found.append(about)
    return found
