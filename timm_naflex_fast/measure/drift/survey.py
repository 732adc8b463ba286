"""Run a model under each contender on the same batches, and compare what comes out with timm's own
result."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...names import STRATEGY_NAMES
from ..contenders import BASELINE, use
from .pictures import Picture, choose, picture
from .rounding import position_tables, rounding


@dataclass(frozen=True)
class Drift:
    """One contender's distance from timm's own result; all zero is that result itself.

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


Batches = Iterable[tuple[dict[str, Any], Tensor | None]]


def survey(
    model: Any,
    batches: Batches,
    contenders: Iterable[str] = STRATEGY_NAMES,
    pictures: bool = False,
    advance: Callable[[float], Any] = lambda share: None,
) -> Survey:
    """Drift of each contender from timm's own result, on the CPU and in the model's dtype (no
    autocast).

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
    embeds, tables = model.embeds, position_tables(model.embeds)
    if not tables:
        raise ValueError(
            "the model has no position table, learned or factorized: nothing is resampled"
        )
    reason = f"it resamples a learned 2-D table; this model's is {embeds.pos_embed_type!r}"
    flags = [name for name in contenders if name.startswith("timm-flag-")]
    left_out = dict.fromkeys(flags if embeds.pos_embed_type != "learned" else (), reason)
    passes = {
        name: list[dict[str, Tensor]]() for name in [BASELINE, *contenders] if name not in left_out
    }
    labels: list[Tensor] = []
    grids: list[tuple[int, int]] = []
    for batch, targets in batches:
        for name, found in passes.items():
            tokens, results = _forward(model, batch, name)
            if name == BASELINE:
                timms, allowed = tokens, rounding(embeds, batch["patch_coord"], tokens)
            moves = (tokens - timms).abs()  # (B, N, C)
            results["moved"], results["largest_move"] = (
                moves.square().sum((1, 2)),
                moves.amax((1, 2)),
            )
            results["roundings"] = (moves / allowed).amax((1, 2))
            found.append(results)
            advance(1 / len(passes))
        grids += [(h, w) for h, w in (batch["patch_coord"].amax(1) + 1).long().tolist()]
        labels += [] if targets is None else [targets]
    if not grids:
        raise ValueError("there is no image to measure on")
    seen = {
        name: {key: torch.cat([one[key] for one in found]) for key in found[0]}
        for name, found in passes.items()
    }
    squares, cells = seen[BASELINE]["squares"], [n for table in tables for n in table.shape[1:-1]]
    drift = {name: _drift(results, seen[BASELINE], labels) for name, results in seen.items()}
    shrinks = [max(n / patches for n, patches in zip(cells, grid)) for grid in grids]
    shown = [name for name in drift if drift[name].embed_roundings > 1]
    shown = [name for name in shown if name in STRATEGY_NAMES] or shown[:1]
    kept: list[Picture] = []
    if pictures and shown:
        shares = (seen[shown[0]]["moved"] / squares).sqrt().nan_to_num().tolist()
        kept = _pictures(model, batches, shown, choose(shares, shrinks))
    by_grid = []
    for grid in sorted(
        set(grids), key=lambda grid: (grid[1] / grid[0], grid)
    ):  # by aspect, then by size
        here = [place for place, other in enumerate(grids) if other == grid]
        off = {
            name: relative_rms(results["moved"][here], squares[here])
            for name, results in seen.items()
        }
        by_grid.append(
            dict(grid=grid, images=len(here), shrink=shrinks[here[0]], embed_rel_rms=off)
        )
    return Survey(len(grids), drift, by_grid, left_out, kept)


def _forward(
    model: Any, inputs: dict[str, Any], contender: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """The embedded patch tokens (B, N, C) in float64, 0 for padding; and each image's results, B of
    each kind."""
    embedded: list[Any] = []
    valid, dtype = inputs["patch_valid"], next(model.parameters()).dtype
    hook = model.embeds.register_forward_hook(lambda module, args, out: embedded.append(out))
    with hook, use(contender, model), torch.inference_mode():
        features = model.forward_features(inputs["patches"].to(dtype), inputs["patch_coord"], valid)
        tokens = embedded[0][0] if isinstance(embedded[0], tuple) else embedded[0]
        tokens = (
            tokens[:, -valid.shape[1] :].double().masked_fill(~valid[..., None], 0)
        )  # no class, register tokens
        results = {"squares": tokens.square().sum((1, 2))}
        if isinstance(features, dict):
            features, valid = features["patches"], features["patch_valid"]
        pooled = results["pooled"] = model.forward_head(
            features, patch_valid=valid, pre_logits=True
        ).float()
        computed = {"embedded tokens": tokens, "pooled output": pooled}
        if model.num_classes:
            computed["logits"] = model.forward_head(features, patch_valid=valid)
            results["classes"] = computed["logits"].argmax(-1)
    for what, values in computed.items():
        if not values.isfinite().all():
            raise ValueError(
                f"with {contender}, the model's {what} hold infinity or NaN in {dtype}"
            )
    return tokens, results


def _pictures(
    model: Any, batches: Batches, shown: Sequence[str], why: dict[int, str]
) -> list[Picture]:
    """The images with these numbers, why each was chosen, and the contenders' maps: the second look
    at them."""
    found: dict[int, Picture] = {}
    places = ((inputs, i) for inputs, _ in batches for i in range(len(inputs["patches"])))
    for place, (inputs, i) in enumerate(islice(places, max(why) + 1)):
        if place in why:
            one = {key: inputs[key][i : i + 1] for key in ("patches", "patch_coord", "patch_valid")}
            timms = _forward(model, one, BASELINE)[0]
            length = timms[one["patch_valid"]].square().sum(-1).mean()
            maps = {
                name: ((_forward(model, one, name)[0] - timms).square().sum(-1) / length).sqrt()
                for name in shown
            }
            name = inputs["names"][i] if "names" in inputs else f"image {place + 1}"
            found[place] = picture(f"{name}: {why[place]}", one, maps, model.embeds)
    return [found[place] for place in why if place in found]


def _drift(results: dict[str, Tensor], timms: dict[str, Tensor], labels: list[Tensor]) -> Drift:
    classes = results.get("classes")
    return Drift(
        embed_max_abs=results["largest_move"].max().item(),
        embed_roundings=results["roundings"].max().item(),
        embed_rel_rms=relative_rms(results["moved"], timms["squares"]),
        pooled_cosine_distance=cosine_distance(results["pooled"], timms["pooled"]).mean().item(),
        neighbours=agreement(nearest(results["pooled"]), nearest(timms["pooled"])),
        agreement=None if classes is None else agreement(classes, timms["classes"]),
        accuracy=None if classes is None or not labels else agreement(classes, torch.cat(labels)),
    )


# The measures, in float64; zero (agreement: one) is no drift at all.


def relative_rms(squared: Tensor, reference: Tensor) -> float:
    """Root of the summed squared differences over that of the reference's squares; infinite where
    only those are 0."""
    above, below = squared.sum().item(), reference.sum().item()
    return (above / below) ** 0.5 if below else float("inf") if above else 0.0


def cosine_distance(ours: Tensor, reference: Tensor) -> Tensor:
    """1 - cosine between the rows of two (N, D) tensors: (N,) float64, exactly 0 for equal rows."""
    a, b = (F.normalize(rows.double(), dim=-1) for rows in (ours, reference))
    # |a - b|^2 / 2 of unit vectors is 1 - cosine without the cancellation that hides small angles.
    return (a - b).square().sum(-1) / 2


def nearest(rows: Tensor) -> Tensor:
    """Per row of (N, D) the index (N,) of the most similar other row by cosine, the first of
    equals."""
    directions = F.normalize(rows.double(), dim=-1)
    found = []
    for start in range(
        0, len(rows), 1024
    ):  # the whole similarity matrix of a large folder may not fit
        similar = directions[start : start + 1024] @ directions.t()
        similar[:, start:].fill_diagonal_(-2)  # an image is no neighbour of itself
        found.append(similar.argmax(-1))
    return torch.cat(found)


def agreement(ours: Tensor, reference: Tensor) -> float:
    """Share of equal entries of two (N,) tensors."""
    return (ours == reference).double().mean().item()
