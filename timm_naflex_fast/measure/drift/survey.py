"""Run a model under each contender on the same batches, and compare with timm's own result."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...names import STRATEGY_NAMES
from ...patching.timm import tables_of
from ..contenders import BASELINE, use
from ..stages import recorded
from .measures import agreement, classes, cosine_distance, relative_rms, same_nearest
from .pictures import Picture, choose, on_grid, pixels_of
from .rounding import rounding

Batches = Iterable[tuple[dict[str, Any], Tensor | None]]
Tensors = dict[str, Tensor]
IMAGE = ("patches", "patch_coord", "patch_valid")


@dataclass(frozen=True)
class Drift:
    """One contender's distance from timm's own result; all zero is that result itself.

    A choice (of a neighbour, of a class) that rounding alone explains counts as timm's own; see
    ``measures``.

    Attributes:
        embed_max_abs: largest absolute difference of the embedded tokens (valid ones), in the
            embeddings' units.
        embed_roundings: the largest difference of an element over what rounding explains there (see
            ``rounding``); up to 1 nothing but rounding differs.
        embed_rel_rms: root mean square of the differences over that of timm's embeddings.
        pooled_cosine_distance: 1 - cosine of the pooled outputs, mean over images.
        neighbours: share of images whose nearest other image (by pooled output) is timm's.
        agreement: share of images with timm's predicted class; None for a model without classes.
        accuracy: share of right predictions; None without classes or labels.
    """

    embed_max_abs: float
    embed_roundings: float
    embed_rel_rms: float
    pooled_cosine_distance: float
    neighbours: float
    agreement: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Survey:
    """All that was measured; each dictionary's keys are the contenders, stock first.

    Attributes:
        images: how many were measured.
        grids: one entry for each patch grid: "grid" (h, w), "images", "shrink" (table cells per
            patch, along the axis where there are more), "embed_rel_rms" by contender.
        pictures: the images that show the drift of the first contender that is not exact, if it
            was asked for and there is one.
    """

    images: int
    drift: dict[str, Drift]
    grids: list[dict[str, Any]]
    pictures: list[Picture]

    def exact(self, name: str) -> bool:
        """Whether a contender is timm's own result but for rounding."""
        return self.drift[name].embed_roundings <= 1


def survey(
    model: Any,
    batches: Batches,
    contenders: Iterable[str] = STRATEGY_NAMES,
    pictures: bool = False,
    advance: Callable[[float], Any] = lambda share: None,
) -> Survey:
    """Drift of each contender from timm's own result, on the CPU and in the model's dtype.

    Args:
        model: a timm NaFlexVit in eval mode.
        batches: (input dict of timm's NaFlex collator, labels (B,) or None). The dict may hold
            "names", a list of B strings. For pictures they are read a second time.
        contenders: names out of ``CONTENDERS``; timm's own settings are left out for factorized
            tables, which they do not resample.
        pictures: keep the worst and the median image, with maps of drift over their patches.
        advance: called after each contender's pass over a batch, with that pass's share of the
            batch's work.

    Raises:
        ValueError: no position table; or infinity or NaN in what the model computes.
    """
    if tables_of(model.embeds) is None:
        raise ValueError(
            "the model has no position table, learned or factorized: nothing is resampled"
        )
    names = [*dict.fromkeys([BASELINE, *contenders])]  # each once
    if model.embeds.pos_embed_type != "learned":
        names = [name for name in names if not name.startswith("timm-flag-")]
    results = _run_all(model, batches, names, advance)
    drift = {name: _drift(results[name], results[BASELINE]) for name in names}
    grids = _by_grid(tables_of(model.embeds), results)
    found = Survey(len(results[BASELINE]["grid"]), drift, grids, [])
    moving = [name for name in names if not found.exact(name)]
    if pictures and moving:
        found.pictures.extend(_pictures(model, batches, moving[0], results[moving[0]]))
    return found


def _run_all(
    model: Any, batches: Batches, names: Sequence[str], advance: Callable[[float], Any]
) -> dict[str, Tensors]:
    """Each contender's results, a tensor (N, ...) of each kind for N images."""
    parts: dict[str, list[Tensors]] = {name: [] for name in names}
    for batch, labels in batches:
        timms = _forward(model, batch, BASELINE)
        allowed = rounding(model.embeds, batch["patch_coord"], timms["embedded tokens"])
        images = {"grid": batch["patch_coord"].amax(1).long() + 1}  # (B, 2)
        if labels is not None:
            images["labels"] = labels
        for name in names:
            ours = timms
            if name != BASELINE:
                ours = _forward(model, batch, name)
            parts[name].append(images | _compare(ours, timms, allowed))
            advance(1 / len(names))
    results = {}
    for name, found in parts.items():
        results[name] = {key: torch.cat([part[key] for part in found]) for key in found[0]}
    return results


def _compare(ours: Tensors, timms: Tensors, allowed: Tensor) -> Tensors:
    """What is kept of a batch: for each image its results, B of each kind.

    ``squares`` are the sums of timm's squared tokens, ``moved`` those of the squared differences.
    """
    tokens = timms["embedded tokens"]
    moves = (ours["embedded tokens"] - tokens).abs()  # (B, N, C)
    results = {
        "squares": tokens.square().sum((1, 2)),
        "moved": moves.square().sum((1, 2)),
        "largest_move": moves.amax((1, 2)),
        "roundings": (moves / allowed).amax((1, 2)),
        "pooled": ours["pooled output"],
    }
    if "logits" in ours:
        results["classes"] = classes(ours["logits"], timms["logits"])
    return results


def _forward(model: Any, inputs: dict[str, Any], contender: str) -> Tensors:
    """What the model computes for a batch under a contender.

    The embedded tokens (B, N, C) in float64, 0 for padding; the pooled output (B, D) and, of a
    model with classes, the logits (B, classes) in the model's dtype.

    Raises:
        ValueError: infinity or NaN in one of them.
    """
    valid = inputs["patch_valid"]
    dtype = next(model.parameters()).dtype
    watched = recorded({"tokens": model.embeds, "pooled output": model.head_drop})
    with watched as inside, use(contender, model), torch.inference_mode():
        logits = model(inputs["patches"].to(dtype), inputs["patch_coord"], valid)

    tokens = inside["tokens"][:, -valid.shape[1] :].double()  # without class and register tokens
    found = {
        "embedded tokens": tokens.masked_fill(~valid[..., None], 0),
        "pooled output": inside["pooled output"],
    }
    if model.num_classes:
        found["logits"] = logits
    for what, values in found.items():
        if not values.isfinite().all():
            raise ValueError(
                f"with {contender}, the model's {what} hold infinity or NaN in {dtype}"
            )
    return found


def _drift(ours: Tensors, timms: Tensors) -> Drift:
    pooled = ours["pooled"]
    same_class = None
    accuracy = None
    if "classes" in ours:
        same_class = agreement(ours["classes"], timms["classes"])
        if "labels" in ours:
            accuracy = agreement(ours["classes"], ours["labels"])
    return Drift(
        embed_max_abs=ours["largest_move"].max().item(),
        embed_roundings=ours["roundings"].max().item(),
        embed_rel_rms=relative_rms(ours["moved"], timms["squares"]),
        pooled_cosine_distance=cosine_distance(pooled, timms["pooled"]).mean().item(),
        neighbours=same_nearest(pooled, timms["pooled"], pooled.dtype),
        agreement=same_class,
        accuracy=accuracy,
    )


def _by_grid(tables: Any, results: dict[str, Tensors]) -> list[dict[str, Any]]:
    """``Survey.grids``."""
    table_size = torch.tensor(tables.size)
    grids = results[BASELINE]["grid"]  # (N, 2)
    found = []
    for grid in grids.unique(dim=0):
        here = (grids == grid).all(1)
        squares = results[BASELINE]["squares"][here]
        off = {}
        for name, one in results.items():
            off[name] = relative_rms(one["moved"][here], squares)
        about = {
            "grid": tuple(grid.tolist()),
            "images": len(squares),
            "shrink": (table_size / grid).max().item(),
            "embed_rel_rms": off,
        }
        found.append(about)
    return found


def _pictures(model: Any, batches: Batches, contender: str, ours: Tensors) -> list[Picture]:
    """The images to show of a contender, with its maps; ``ours`` are its results."""
    why = choose(ours["moved"] / ours["squares"])
    found = []
    number = 0
    for inputs, _ in batches:
        for place in range(len(inputs["patches"])):
            if number in why:
                image = {key: inputs[key][place : place + 1] for key in IMAGE}
                name = inputs["names"][place] if "names" in inputs else f"image {number + 1}"
                title = f"{name}: {why[number]}"
                found.append(
                    _picture(model, image, ours["grid"][number].tolist(), contender, title)
                )
            number += 1
    return found


def _picture(model: Any, image: Tensors, grid: list[int], contender: str, title: str) -> Picture:
    """A batch of one image, and what the contender changes there."""
    timms = _forward(model, image, BASELINE)["embedded tokens"]
    moved = _forward(model, image, contender)["embedded tokens"] - timms
    return Picture(
        name=title,
        contender=contender,
        pixels=pixels_of(on_grid(image["patches"], grid), model.embeds),
        map=on_grid(moved.norm(dim=-1) / timms.norm(dim=-1), grid),
    )
