"""Run a model under each contender on the same batches, and compare with timm's own result."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....names import STRATEGY_NAMES
from ....patching.timm import tables_of
from ..contenders import BASELINE, use
from ..pipelines import recorded

Batches = Iterable[tuple[dict[str, Any], Tensor | None]]
Tensors = dict[str, Tensor]
FLOAT32 = 2e-6
"""What sums in float32 may move a number by, as a share of the largest near it."""


@dataclass(frozen=True)
class Drift:
    """One contender's distance from timm's own result; all zero is that result itself.

    Attributes:
        embed_max_abs: largest absolute difference of the embedded tokens (valid ones), in the
            embeddings' units.
        embed_roundings: the largest difference, as a share of the largest number of its token or
            its channel (the smaller one), over what rounding moves; up to 1 nothing but rounding
            differs.
        embed_rel_rms: root mean square of the differences over that of timm's embeddings.
        pooled_cosine_distance: 1 - cosine of the outputs, mean over images; over the tokens of all
            images for a model that pools nothing.
        agreement: share of images with timm's predicted class; None for a model without classes.
        accuracy: share of right predictions; None without classes or labels.
    """

    embed_max_abs: float
    embed_roundings: float
    embed_rel_rms: float
    pooled_cosine_distance: float
    agreement: float | None
    accuracy: float | None


@dataclass(frozen=True)
class GridDrift:
    """What was measured on the images of one patch grid.

    Attributes:
        grid: rows and columns.
        images: how many.
        shrink: table cells per patch, along the axis where there are more.
        embed_rel_rms: as in :class:`Drift`, by contender.
        resampled: whether it is another grid than the table's own.
    """

    grid: tuple[int, int]
    images: int
    shrink: float
    embed_rel_rms: dict[str, float]
    resampled: bool = True


@dataclass(frozen=True)
class Survey:
    """All that was measured; each dictionary's keys are the contenders, stock first.

    Attributes:
        images: how many were measured.
        drift: of each contender.
        grids: one entry for each patch grid.
    """

    images: int
    drift: dict[str, Drift]
    grids: list[GridDrift]

    def exact(self, name: str) -> bool:
        """Whether a contender is timm's own result but for rounding."""
        return self.drift[name].embed_roundings <= 1

    def unknown(self, name: str) -> str | None:
        """Why these images cannot tell that a contender is exact on others too, or None."""
        if not any(grid.resampled for grid in self.grids):
            return "every image has the table's own grid, so nothing was resampled"
        # Two ways of enlarging a table can be the same; antialiasing shows where one is shrunk.
        if name == "grid_sample" and not any(grid.shrink > 1 for grid in self.grids):
            return "no image has a grid smaller than the table, where it does not antialias"
        return None


def survey(
    model: Any,
    batches: Batches,
    contenders: Iterable[str] = STRATEGY_NAMES,
    advance: Callable[[float], Any] = lambda share: None,
) -> Survey:
    """Drift of each contender from timm's own result, on the CPU and in the model's dtype.

    Args:
        model: a timm NaFlexVit in eval mode.
        batches: (input dict of timm's NaFlex collator, labels (B,) or None).
        contenders: names out of ``CONTENDERS``; timm's own settings are left out for factorized
            tables, which they do not resample.
        advance: called after each contender's pass over a batch, with that pass's share of the
            batch's work.

    Raises:
        ValueError: no position table; or infinity or NaN in what the model computes.
    """
    tables = tables_of(model.embeds)
    if tables is None:
        raise ValueError(
            "the model has no position table, learned or factorized: nothing is resampled"
        )
    names = [*dict.fromkeys([BASELINE, *contenders])]  # each once
    if model.embeds.pos_embed_type != "learned":
        names = [name for name in names if not name.startswith("timm-flag-")]
    results = _run_all(model, batches, names, advance)
    eps = torch.finfo(next(model.parameters()).dtype).eps
    drift = {name: _drift(results[name], FLOAT32 + eps) for name in names}
    grids = _by_grid(tables.size, results)
    return Survey(len(results[BASELINE]["grid"]), drift, grids)


def _run_all(
    model: Any, batches: Batches, names: Sequence[str], advance: Callable[[float], Any]
) -> dict[str, Tensors]:
    """Each contender's results, a tensor (N,) of each kind for N images."""
    parts: dict[str, list[Tensors]] = {name: [] for name in names}
    for batch, labels in batches:
        timms = _forward(model, batch, BASELINE)
        for name in names:
            ours = timms
            if name != BASELINE:
                ours = _forward(model, batch, name)
            found = _compare(ours, timms)
            found["grid"] = batch["patch_coord"].amax(1).long() + 1  # (B, 2)
            if labels is not None and "classes" in ours:
                found["right"] = (ours["classes"] == labels).double()
            parts[name].append(found)
            advance(1 / len(names))
    results = {}
    for name, found_parts in parts.items():
        first = found_parts[0]
        results[name] = {key: torch.cat([part[key] for part in found_parts]) for key in first}
    return results


def _compare(ours: Tensors, timms: Tensors) -> Tensors:
    """What is kept of a batch: for each image its results, (B,) of each kind.

    ``squares`` are the sums of timm's squared tokens, ``moved`` those of the squared differences.
    """
    tokens = timms["tokens"]  # (B, N, C), 0 for padding
    moves = ours["tokens"] - tokens
    # An outlier of one token, or of one channel, excuses nothing elsewhere.
    sizes = tokens.abs()
    scale = torch.minimum(sizes.amax(-1, keepdim=True), sizes.amax((0, 1)))  # (B, N, C)
    shares = moves.abs() / scale.clamp(min=1e-30)
    results = {
        "squares": tokens.square().sum((1, 2)),
        "moved": moves.square().sum((1, 2)),
        "largest_move": moves.abs().amax((1, 2)),
        "largest_share": shares.amax((1, 2)),
        "distance": cosine_distance(ours["output"], timms["output"]),
    }
    if "classes" in ours:
        results["same"] = (ours["classes"] == timms["classes"]).double()
    return results


def cosine_distance(ours: Tensor, timms: Tensor) -> Tensor:
    """1 - cosine between the rows of two (B, D) tensors in float64, exactly 0 for equal rows."""
    # |a - b|^2 / 2 of unit vectors is 1 - cosine without the cancellation that hides small angles.
    return (F.normalize(ours, dim=-1) - F.normalize(timms, dim=-1)).square().sum(-1) / 2


def _forward(model: Any, inputs: dict[str, Any], contender: str) -> Tensors:
    """What the model computes for a batch under a contender.

    Its embedded tokens (B, N, C) and its output (B, D), in float64; of a model that pools nothing
    all tokens of an image in a row, 0 for padding. And the predicted classes (B,), if it has some.

    Raises:
        ValueError: infinity or NaN in one of them.
    """
    valid = inputs["patch_valid"]
    dtype = next(model.parameters()).dtype
    watched = recorded({"tokens": model.embeds, "output": model.head_drop})
    with watched as inside, use(contender, model), torch.inference_mode():
        logits = model(inputs["patches"].to(dtype), inputs["patch_coord"], valid)

    found = {"tokens": _of_patches(inside["tokens"], valid), "output": inside["output"].double()}
    if inside["output"].ndim == 3:  # (B, N, C)
        found["output"] = _of_patches(inside["output"], valid).flatten(1)
    elif model.num_classes:
        found["logits"] = logits
        found["classes"] = logits.argmax(-1)
    for what, values in found.items():
        if not values.isfinite().all():
            raise ValueError(
                f"with {contender}, the model's {what} hold infinity or NaN in {dtype}"
            )
    return found


def _of_patches(tokens: Tensor, valid: Tensor) -> Tensor:
    """Tokens without those of class and registers, in float64, 0 for padding: (B, N, C)."""
    own = tokens[:, -valid.shape[1] :].double()
    return own.masked_fill(~valid[..., None], 0)


def _drift(found: Tensors, rounding: float) -> Drift:
    """The figures of all images; ``rounding``: what it may move a number by, as a share."""
    means = {key: found[key].mean().item() for key in ("same", "right") if key in found}
    return Drift(
        embed_max_abs=found["largest_move"].max().item(),
        embed_roundings=found["largest_share"].max().item() / rounding,
        embed_rel_rms=_relative_rms(found),
        pooled_cosine_distance=found["distance"].mean().item(),
        agreement=means.get("same"),
        accuracy=means.get("right"),
    )


def _relative_rms(found: Tensors) -> float:
    """Root of the sum of squared differences over that of the squares of timm's tokens."""
    return (found["moved"].sum() / found["squares"].sum()).sqrt().item()


def _by_grid(table_size: Sequence[int], results: dict[str, Tensors]) -> list[GridDrift]:
    """``Survey.grids``."""
    grids = results[BASELINE]["grid"]  # (N, 2)
    found = []
    for grid in grids.unique(dim=0):
        here = (grids == grid).all(1)
        off = {}
        for name, one in results.items():
            own = {key: one[key][here] for key in ("moved", "squares")}
            off[name] = _relative_rms(own)
        height, width = grid.tolist()
        about = GridDrift(
            grid=(height, width),
            images=int(here.sum()),
            shrink=max(table_size[0] / height, table_size[1] / width),
            embed_rel_rms=off,
            resampled=[height, width] != list(table_size),
        )
        found.append(about)
    return found
