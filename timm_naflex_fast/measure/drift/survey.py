"""Run a model under each contender on the same batches, and compare with timm's own result."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...names import STRATEGY_NAMES
from ...patching.timm import tables_of
from ..contenders import BASELINE, use
from ..pipelines import recorded
from .measures import agreement, classes, cosine_distance, relative_rms, same_nearest
from .pictures import Picture, choose, on_grid, pixels_of
from .rounding import rounding

Batches = Iterable[tuple[dict[str, Any], Tensor | None]]
Tensors = dict[str, Tensor]
IMAGE = ("patches", "patch_coord", "patch_valid")
SMALLEST_SHOWN = 5e-5  # on a map: what rounds to 0.01 % of a token's length


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
        pooled_cosine_distance: 1 - cosine of the pooled outputs, mean over images; None for a model
            that pools nothing.
        neighbours: share of images whose nearest other image (by pooled output) is timm's; None
            where nothing is pooled, and for fewer than three images, where there is no choice.
        agreement: share of images with timm's predicted class; None for a model without classes.
        accuracy: share of right predictions; None without classes or labels.
        tokens_cosine_distance: 1 - cosine of the last tokens, mean over the tokens of an image and
            then over images; only for a model that pools nothing.
    """

    embed_max_abs: float
    embed_roundings: float
    embed_rel_rms: float
    pooled_cosine_distance: float | None
    neighbours: float | None
    agreement: float | None
    accuracy: float | None
    tokens_cosine_distance: float | None = None


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
        grids: one entry for each patch grid.
        pictures: the images that show the drift of the first contender that is not exact, if it
            was asked for and there is one.
    """

    images: int
    drift: dict[str, Drift]
    grids: list[GridDrift]
    pictures: list[Picture]

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
            parts[name].append(images | _compare(ours, timms, allowed, batch["patch_valid"]))
            advance(1 / len(names))
    results = {}
    for name, found in parts.items():
        results[name] = {key: torch.cat([part[key] for part in found]) for key in found[0]}
    return results


def _compare(ours: Tensors, timms: Tensors, allowed: Tensor, valid: Tensor) -> Tensors:
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
    }
    if "pooled output" in ours:
        results["pooled"] = ours["pooled output"]
    else:
        distances = cosine_distance(ours["last tokens"], timms["last tokens"])  # (B, N)
        results["tokens_distance"] = distances.sum(1) / valid.sum(1)  # 0 for padding
    if "logits" in ours:
        results["classes"] = classes(ours["logits"], timms["logits"])
    return results


def _forward(model: Any, inputs: dict[str, Any], contender: str) -> Tensors:
    """What the model computes for a batch under a contender.

    The embedded tokens (B, N, C) in float64, 0 for padding; the pooled output (B, D) and, of a
    model with classes, the logits (B, classes) in the model's dtype. Of a model that pools nothing
    the last tokens, as the embedded ones, in place of these two.

    Raises:
        ValueError: infinity or NaN in one of them.
    """
    valid = inputs["patch_valid"]
    dtype = next(model.parameters()).dtype
    watched = recorded({"embedded tokens": model.embeds, "output": model.head_drop})
    with watched as inside, use(contender, model), torch.inference_mode():
        logits = model(inputs["patches"].to(dtype), inputs["patch_coord"], valid)

    found = {"embedded tokens": _of_patches(inside["embedded tokens"], valid)}
    if inside["output"].ndim == 3:  # (B, N, C)
        found["last tokens"] = _of_patches(inside["output"], valid)
    else:
        found["pooled output"] = inside["output"]
        if model.num_classes:
            found["logits"] = logits
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


def _drift(ours: Tensors, timms: Tensors) -> Drift:
    distance = None
    neighbours = None
    tokens_distance = None
    if "pooled" in ours:
        pooled = ours["pooled"]
        distance = cosine_distance(pooled, timms["pooled"]).mean().item()
        if len(pooled) >= 3:  # of two, each has but one other
            neighbours = same_nearest(pooled, timms["pooled"], pooled.dtype)
    else:
        tokens_distance = ours["tokens_distance"].mean().item()
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
        pooled_cosine_distance=distance,
        neighbours=neighbours,
        agreement=same_class,
        accuracy=accuracy,
        tokens_cosine_distance=tokens_distance,
    )


def _by_grid(tables: Any, results: dict[str, Tensors]) -> list[GridDrift]:
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
        height, width = grid.tolist()
        about = GridDrift(
            grid=(height, width),
            images=len(squares),
            shrink=(table_size / grid).max().item(),
            embed_rel_rms=off,
            resampled=[height, width] != list(tables.size),
        )
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
    shares = moved.norm(dim=-1) / timms.norm(dim=-1)
    # Rounding alone would make a map of noise, in all its colours.
    shares = shares.where(shares >= SMALLEST_SHOWN, 0)
    return Picture(
        name=title,
        contender=contender,
        pixels=pixels_of(on_grid(image["patches"], grid), model.embeds),
        map=on_grid(shares, grid),
    )
