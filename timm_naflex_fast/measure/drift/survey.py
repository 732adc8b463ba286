"""Run a model under each contender on the same batches, and compare with timm's own result."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from ...names import STRATEGY_NAMES
from ..contenders import BASELINE, use
from .measures import agreement, classes, cosine_distance, relative_rms, same_nearest
from .pictures import Picture, choose, picture
from .rounding import position_tables, rounding

Batches = Iterable[tuple[dict[str, Any], Tensor | None]]
Grid = tuple[int, int]


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
        grids: one entry for each patch grid, from tall to wide: "grid" (h, w), "images", "shrink"
            (table cells per patch), "embed_rel_rms" by contender.
        left_out: contenders that this model cannot run, each with the reason.
        pictures: the images that show the drift, if it was asked for and there is any.
    """

    images: int
    drift: dict[str, Drift]
    grids: list[dict[str, Any]]
    left_out: dict[str, str]
    pictures: list[Picture]

    def exact(self, name: str) -> bool:
        """Whether a contender is timm's own result but for rounding."""
        return self.drift[name].embed_roundings <= 1


@dataclass(frozen=True)
class Output:
    """What a model computes for a batch.

    Attributes:
        tokens: (B, N, C) float64, the embedded patches; 0 for padding.
        pooled: (B, D) float32.
        logits: (B, classes) in the model's dtype; None for a model without classes.
    """

    tokens: Tensor
    pooled: Tensor
    logits: Tensor | None


@dataclass(frozen=True)
class Compared:
    """Each contender's results for N images, a tensor (N, ...) of each kind; see ``_compare``."""

    results: dict[str, dict[str, Tensor]]
    grids: list[Grid]
    labels: Tensor | None
    dtype: torch.dtype

    @property
    def timms(self) -> dict[str, Tensor]:
        """The results of timm's own code."""
        return self.results[BASELINE]


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
        contenders: names out of ``CONTENDERS``; those that this model cannot run are left out.
        pictures: keep a few images with maps of drift over their patches.
        advance: called after each contender's pass over a batch, with that pass's share of the
            batch's work.

    Raises:
        ValueError: no images; no position table; or infinity or NaN in what the model computes.
    """
    if not position_tables(model.embeds):
        raise ValueError(
            "the model has no position table, learned or factorized: nothing is resampled"
        )
    asked = dict.fromkeys([BASELINE, *contenders])  # each once
    left_out = _left_out(model.embeds, asked)
    names = [name for name in asked if name not in left_out]
    compared = _run_all(model, batches, names, advance)
    shrinks = _shrinks(model.embeds, compared.grids)
    drift = {name: _drift(compared, name) for name in names}
    kept: list[Picture] = []
    if pictures:
        kept = _choose_pictures(model, batches, drift, compared, shrinks)
    return Survey(
        images=len(compared.grids),
        drift=drift,
        grids=_by_grid(compared, shrinks),
        left_out=left_out,
        pictures=kept,
    )


def _left_out(embeds: Any, contenders: Iterable[str]) -> dict[str, str]:
    """The contenders that the model cannot run, each with the reason."""
    if embeds.pos_embed_type == "learned":
        return {}
    reason = f"it resamples a learned 2-D table; this model's is {embeds.pos_embed_type!r}"
    return {name: reason for name in contenders if name.startswith("timm-flag-")}


def _run_all(
    model: Any, batches: Batches, names: Sequence[str], advance: Callable[[float], Any]
) -> Compared:
    """Each contender's results for every image of ``batches``."""
    found: dict[str, list[dict[str, Tensor]]] = {name: [] for name in names}
    grids: list[Grid] = []
    labels: list[Tensor] = []
    for batch, targets in batches:
        timms = _forward(model, batch, BASELINE)
        allowed = rounding(model.embeds, batch["patch_coord"], timms.tokens)
        for name in names:
            ours = timms
            if name != BASELINE:
                ours = _forward(model, batch, name)
            found[name].append(_compare(ours, timms, allowed))
            advance(1 / len(names))
        sizes = (batch["patch_coord"].amax(1) + 1).long()  # (B, 2)
        grids.extend((h, w) for h, w in sizes.tolist())
        if targets is not None:
            labels.append(targets)
    if not grids:
        raise ValueError("there is no image to measure on")

    return Compared(
        results={name: _joined(parts) for name, parts in found.items()},
        grids=grids,
        labels=torch.cat(labels) if labels else None,
        dtype=next(model.parameters()).dtype,
    )


def _joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The results of all batches, put one behind the other."""
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0]}


def _compare(ours: Output, timms: Output, allowed: Tensor) -> dict[str, Tensor]:
    """What is kept of a batch: for each image its results, B of each kind.

    ``squares`` are the sums of timm's squared tokens, ``moved`` those of the squared differences.
    """
    moves = (ours.tokens - timms.tokens).abs()  # (B, N, C)
    results = {
        "squares": timms.tokens.square().sum((1, 2)),
        "moved": moves.square().sum((1, 2)),
        "largest_move": moves.amax((1, 2)),
        "roundings": (moves / allowed).amax((1, 2)),
        "pooled": ours.pooled,
    }
    if ours.logits is not None and timms.logits is not None:
        results["classes"] = classes(ours.logits, timms.logits)
    return results


def _forward(model: Any, inputs: dict[str, Any], contender: str) -> Output:
    """What the model computes for a batch under a contender."""
    valid = inputs["patch_valid"]
    dtype = next(model.parameters()).dtype
    embedded: list[Any] = []

    def keep(module: Any, arguments: Any, output: Any) -> None:
        embedded.append(output)

    hook = model.embeds.register_forward_hook(keep)
    with hook, use(contender, model), torch.inference_mode():
        features = model.forward_features(inputs["patches"].to(dtype), inputs["patch_coord"], valid)
        mask = valid
        if isinstance(features, dict):
            mask = features["patch_valid"]
            features = features["patches"]
        pooled = model.forward_head(features, patch_valid=mask, pre_logits=True).float()
        logits = None
        if model.num_classes:
            logits = model.forward_head(features, patch_valid=mask)

    tokens = embedded[0]
    if isinstance(tokens, tuple):
        tokens = tokens[0]
    tokens = tokens[:, -valid.shape[1] :].double()  # without class and register tokens
    output = Output(tokens.masked_fill(~valid[..., None], 0), pooled, logits)
    _check_finite(output, contender, dtype)
    return output


def _check_finite(output: Output, contender: str, dtype: torch.dtype) -> None:
    computed = {
        "embedded tokens": output.tokens,
        "pooled output": output.pooled,
        "logits": output.logits,
    }
    for what, values in computed.items():
        if values is not None and not values.isfinite().all():
            raise ValueError(
                f"with {contender}, the model's {what} hold infinity or NaN in {dtype}"
            )


def _drift(compared: Compared, name: str) -> Drift:
    ours = compared.results[name]
    timms = compared.timms
    same_class = None
    accuracy = None
    if "classes" in ours:
        same_class = agreement(ours["classes"], timms["classes"])
        if compared.labels is not None:
            accuracy = agreement(ours["classes"], compared.labels)
    return Drift(
        embed_max_abs=ours["largest_move"].max().item(),
        embed_roundings=ours["roundings"].max().item(),
        embed_rel_rms=relative_rms(ours["moved"], timms["squares"]),
        pooled_cosine_distance=cosine_distance(ours["pooled"], timms["pooled"]).mean().item(),
        neighbours=same_nearest(ours["pooled"], timms["pooled"], compared.dtype),
        agreement=same_class,
        accuracy=accuracy,
    )


def _shrinks(embeds: Any, grids: Sequence[Grid]) -> list[float]:
    """Table cells per patch of each image, along the axis where there are more."""
    cells: list[int] = []
    for table in position_tables(embeds):
        cells.extend(table.shape[1:-1])
    rows, columns = cells
    return [max(rows / h, columns / w) for h, w in grids]


def _by_grid(compared: Compared, shrinks: Sequence[float]) -> list[dict[str, Any]]:
    """``Survey.grids``: from tall to wide, then by size."""
    places: dict[Grid, list[int]] = {}
    for place, grid in enumerate(compared.grids):
        places.setdefault(grid, []).append(place)

    found = []
    for grid in sorted(places, key=lambda grid: (grid[1] / grid[0], grid)):
        here = places[grid]
        squares = compared.timms["squares"][here]
        off = {}
        for name, results in compared.results.items():
            off[name] = relative_rms(results["moved"][here], squares)
        one = {"grid": grid, "images": len(here), "shrink": shrinks[here[0]], "embed_rel_rms": off}
        found.append(one)
    return found


def _choose_pictures(
    model: Any,
    batches: Batches,
    drift: dict[str, Drift],
    compared: Compared,
    shrinks: Sequence[float],
) -> list[Picture]:
    """The images to show; none where nothing but rounding differs."""
    moving = [name for name, one in drift.items() if one.embed_roundings > 1]
    if not moving:
        return []
    # The maps are of this package's strategies; of another contender where none of them moves.
    shown = [name for name in moving if name in STRATEGY_NAMES]
    if not shown:
        shown = moving[:1]
    moved = compared.results[shown[0]]["moved"]
    shares = (moved / compared.timms["squares"]).sqrt().nan_to_num().tolist()
    return _pictures(model, batches, shown, choose(shares, shrinks))


def _pictures(
    model: Any, batches: Batches, shown: Sequence[str], why: dict[int, str]
) -> list[Picture]:
    """The images with these numbers, why each was chosen, and the contenders' maps."""
    found: dict[int, Picture] = {}
    for place, (name, image) in enumerate(islice(_images(batches), max(why) + 1)):
        if place in why:
            maps = _maps(model, image, shown)
            title = f"{name or f'image {place + 1}'}: {why[place]}"
            found[place] = picture(title, image, maps, model.embeds)
    return [found[place] for place in why if place in found]


def _images(batches: Batches) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The images one by one, each as a batch of its own, with its name ("" if it has none)."""
    for inputs, _ in batches:
        count = len(inputs["patches"])
        names = inputs.get("names", [""] * count)
        for i in range(count):
            image = {}
            for key in ("patches", "patch_coord", "patch_valid"):
                image[key] = inputs[key][i : i + 1]
            yield names[i], image


def _maps(model: Any, image: dict[str, Tensor], shown: Sequence[str]) -> dict[str, Tensor]:
    """For each contender (1, N): the length of a token's difference over timm's RMS length."""
    timms = _forward(model, image, BASELINE).tokens
    length = timms[image["patch_valid"]].square().sum(-1).mean()
    maps = {}
    for name in shown:
        moved = _forward(model, image, name).tokens - timms
        maps[name] = (moved.square().sum(-1) / length).sqrt()
    return maps
