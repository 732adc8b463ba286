"""Run a model in each mode on the same batches, and compare with timm's own result."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....names import BASELINE, STRATEGY_NAMES
from ....patching.install import enable
from ....patching.timm_methods import read_embeds
from ....pos_embed.table import whole
from ..output import progress
from ..pipelines import recorded

Batches = Iterable[tuple[dict[str, Any], Tensor | None]]
Tensors = dict[str, Tensor]
Survey = dict[str, Any]  # see ``survey``
FLOAT32 = 2e-6
"""What sums in float32 may move a number by, as a share of the largest near it."""
TIE = 1e-5  # of cosine similarity
MEANS = ("pooled_cosine_distance", "neighbours", "agreement", "accuracy")  # over images


def survey(
    model: Any,
    batches: Batches,
    modes: Iterable[str] = STRATEGY_NAMES,
    images: int | None = None,
) -> Survey:
    """Drift of each mode from timm's own result, on the CPU and in float32.

    Args:
        model: a timm NaFlexVit in eval mode.
        batches: (input dict of timm's NaFlex collator, labels (B,) or None).
        modes: names out of ``STRATEGY_NAMES``.
        images: how many there are, for the progress bar.

    Returns:
        The number of "images"; "drift", the figures of each mode, stock first; and "grids", a list
        with what was measured on the images of each patch grid. All zero is timm's own result.

        Figures: ``embed_rel_rms``, the root mean square of the differences of the embedded tokens
        (valid ones) over that of timm's; ``embed_max_abs``, their largest absolute difference, in
        the embeddings' units; ``embed_roundings``, the largest difference, as a share of the largest
        number of its token or its channel (the smaller one), over what rounding moves;
        ``pooled_cosine_distance``, 1 - cosine of the outputs, mean over images; a model that pools
        nothing gives the mean of its last tokens. And shares of images, None where there is no such
        thing: ``neighbours``, whose nearest other image is timm's (of three images at least);
        ``agreement``, with timm's predicted class; ``accuracy``, of right ones.

        Of a grid: ``grid`` [rows, columns], ``images``, ``shrink``, the table's cells per patch
        along the axis where there are more, ``embed_rel_rms`` by mode, and ``resampled``, whether
        it is another grid than the table's own.

    Raises:
        ValueError: no position table; or infinity or NaN in what the model computes.
    """
    tables, _ = read_embeds(model.embeds)
    table_size = whole(tables).shape[:2]
    parts: dict[str, list[Tensors]] = {name: [] for name in [BASELINE, *modes]}
    total = images and images * len(parts)
    with progress("measuring", total=total) as bar:
        for batch, labels in batches:
            made = {}
            for name in parts:
                # Patch kernels and rotary tables stay timm's own: only the position embedding differs.
                mode: Any = name
                with enable("stock", pos_embed=mode, model=model):
                    made[name] = _forward(model, batch, name)
                bar.update(len(batch["patches"]))
            for name, ours in made.items():
                parts[name].append(_compare(ours, made[BASELINE], labels))
    results: dict[str, Tensors] = {}
    for name, some in parts.items():
        results[name] = {key: torch.cat([part[key] for part in some]) for key in some[0]}
    timms = results[BASELINE]
    drift = {}
    for name, ours in progress("comparing", results.items()):
        drift[name] = _drift(ours, timms)
    grids = [_of_grid(grid, table_size, results) for grid in timms["grid"].unique(dim=0)]
    return {"images": len(timms["grid"]), "drift": drift, "grids": grids}


def is_exact(found: Survey, name: str) -> bool:
    """Whether a mode gives timm's own result but for rounding."""
    return found["drift"][name]["embed_roundings"] <= 1


def why_unknown(found: Survey, name: str) -> str | None:
    """Why these images cannot tell that a mode is exact on others too, or None."""
    if not any(grid["resampled"] for grid in found["grids"]):
        return "every image has the table's own grid, so nothing was resampled"
    # Two ways of enlarging a table can be the same; antialiasing shows where one is shrunk.
    if name == "grid_sample" and not any(grid["shrink"] > 1 for grid in found["grids"]):
        return "no image has a grid smaller than the table, where it does not antialias"
    return None


def _forward(model: Any, batch: dict[str, Any], mode: str) -> Tensors:
    """What the model computes for a batch, and the "grid" of each image (B, 2).

    Its embedded "tokens" (B, N, C), 0 for padding. The "directions" of its outputs (B, D), scaled to
    length 1. And the "logits" (B, classes), if it has some.

    Raises:
        ValueError: infinity or NaN in one of them.
    """
    valid = batch["patch_valid"]
    watched = recorded({model.embeds: "tokens", model.head_drop: "output"})
    with watched as found, torch.inference_mode():
        logits = model(batch["patches"], batch["patch_coord"], valid)
    for what, values in found.items():
        # Tokens of classes and registers come first.
        if values.ndim == 3:
            found[what] = values[:, -valid.shape[1] :].masked_fill(~valid[..., None], 0)
    if logits.ndim == 2 and model.num_classes:
        found["logits"] = logits
    for what, values in found.items():
        if not values.isfinite().all():
            raise ValueError(f"with {mode}, the model's {what} hold infinity or NaN")
    found["grid"] = batch["patch_coord"].amax(1).long() + 1
    output = found.pop("output").double()
    # Where nothing is pooled, the sum of the last tokens has the direction of their mean.
    if output.ndim == 3:
        output = output.sum(1)
    found["directions"] = F.normalize(output, dim=-1)
    return found


def _compare(ours: Tensors, timms: Tensors, labels: Tensor | None) -> Tensors:
    """What is kept of a batch: for each image its figures, (B,) of each kind.

    Args:
        ours: what the model computed in a mode.
        timms: timm's own.
        labels: the right classes (B,).

    Returns:
        Figures of :func:`survey` by their names; the ``grid``; ``squares`` (B, 2), the sums of the
        squared differences and of timm's squared tokens; and the ``directions`` of the outputs.
    """
    tokens = timms["tokens"].double()  # (B, N, C), 0 for padding
    moves = ours["tokens"].double() - tokens
    # An outlier of one token, or of one channel, excuses nothing elsewhere.
    sizes = tokens.abs()
    scale = torch.minimum(sizes.amax(-1, keepdim=True), sizes.amax((0, 1)))  # (B, N, C)
    rounding = FLOAT32 * scale.clamp(min=1e-30)
    results = {
        "grid": ours["grid"],
        "directions": ours["directions"],
        "squares": torch.stack([moves, tokens], 1).square().sum((2, 3)),
        "embed_max_abs": moves.abs().amax((1, 2)),
        "embed_roundings": (moves.abs() / rounding).amax((1, 2)),
        # 1 - cosine, without the cancellation that hides small angles.
        "pooled_cosine_distance": (ours["directions"] - timms["directions"]).square().sum(-1) / 2,
    }
    if "logits" in ours:
        classes = ours["logits"].argmax(-1)
        results["agreement"] = classes == timms["logits"].argmax(-1)
        if labels is not None:
            results["accuracy"] = classes == labels
    return results


def _drift(ours: Tensors, timms: Tensors) -> dict[str, float | None]:
    """The figures of all images."""
    if len(ours["grid"]) > 2:
        ours["neighbours"] = same_nearest(ours["directions"], timms["directions"])
    figures: dict[str, float | None] = dict.fromkeys(MEANS)
    for name in ours.keys() & MEANS:
        figures[name] = ours[name].double().mean().item()
    return {
        "embed_rel_rms": _rms(ours["squares"]),
        "embed_max_abs": ours["embed_max_abs"].max().item(),
        "embed_roundings": ours["embed_roundings"].max().item(),
        **figures,
    }


def _of_grid(
    grid: Tensor, table_size: Sequence[int], results: dict[str, Tensors]
) -> dict[str, Any]:
    """The figures of the images of one grid (2,)."""
    here = (results[BASELINE]["grid"] == grid).all(1)
    return {
        "grid": grid.tolist(),
        "images": int(here.sum()),
        "shrink": (torch.tensor(table_size) / grid.double()).max().item(),
        "embed_rel_rms": {name: _rms(ours["squares"][here]) for name, ours in results.items()},
        "resampled": grid.tolist() != list(table_size),
    }


def _rms(squares: Tensor) -> float:
    """Root of the sum of squared differences over that of timm's squared tokens, of (N, 2)."""
    moved, timms = squares.sum(0)
    return (moved / timms).sqrt().item()


def same_nearest(ours: Tensor, timms: Tensor) -> Tensor:
    """Whether the nearest other image of each (N,) is timm's, or as near: by timm's own similarity,
    within ``TIE`` of timm's best.

    Args:
        ours: (N, D) outputs of length 1.
        timms: (N, D) timm's own.
    """
    own = 3 * torch.eye(len(timms))  # an image is no neighbour of itself
    nearest = (ours @ ours.t() - own).argmax(-1, keepdim=True)
    similar = timms @ timms.t() - own  # cosines (N, N)
    found = similar.gather(1, nearest)
    return similar.amax(-1) - found[:, 0] <= TIE
