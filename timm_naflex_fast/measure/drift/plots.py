"""The report's pictures as addresses (data:...) for a page's <img>.

Plots have no background. No pyplot: nothing global changes and no display is needed.
"""

import base64
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.image import imsave

from ..contenders import BASELINE, CONTENDERS
from .pictures import Picture

INK = "#7d8590"  # a middle tone, readable on light and dark pages
FAINT = "#7d859055"
POINTS = 9  # of all words: 12 pixels
WIDTH = 9.0  # inches
FLOOR = 1e-9  # a difference of nothing on a scale of logarithms
TONES = ("#e5534b", "#2da44e", "#c9880a", "#2f81f7", "#d4679c", "#a371f7", "#b0704f", "#1b9aaa")
COLOURS = dict(zip(CONTENDERS, TONES))
STYLE: dict[str, Any] = {
    "font.size": POINTS,
    "axes.titlesize": POINTS,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.titlecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "svg.fonttype": "none",  # words stay words
}


@rc_context(STYLE)
def curves(grids: Sequence[dict[str, Any]], methods: Iterable[str]) -> Figure:
    """Drift of the embeddings over downsampling, a mark per patch grid.

    Each method has a panel of its own, so no mark hides another's; timm's own zeros have none.
    """
    shown = [name for name in methods if name != BASELINE]
    figure = Figure((WIDTH, 3), layout="constrained")
    panels = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    shrinks = [grid["shrink"] for grid in grids]
    for axes, name in zip(panels, shown):
        drift = [100 * grid["embed_rel_rms"][name] for grid in grids]
        axes.plot(shrinks, drift, "o", color=COLOURS[name], alpha=0.6, clip_on=False)
        axes.set_title(name)
    figure.supxlabel("table cells per patch (above 1: shrunk)", fontsize=POINTS)
    figure.supylabel("embeddings off by, RMS (%)", fontsize=POINTS)
    return figure


@rc_context(STYLE)
def stages(against: Mapping[str, Any]) -> Figure:
    """Largest difference from another library's pipeline over the stages, a panel per method.

    Each is a share of the stage's largest number; what is less than ``FLOOR`` is drawn there.
    """
    methods = {BASELINE: against, **against["modes"]}
    figure = Figure((WIDTH, 1.2 + 1.3 * len(methods)), layout="constrained")
    panels = figure.subplots(len(methods), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for axes, (name, one) in zip(panels, methods.items()):
        names = [stage["stage"] for stage in one["stages"]]
        shares = []
        for stage in one["stages"]:
            shares.append(max(stage["largest"] / (stage["scale"] or 1.0), FLOOR))
        axes.plot(names, shares, "o-", color=COLOURS[name], linewidth=0.8)
        axes.set(yscale="log", title=name)
    # Names that would lie on each other are left out.
    every = 1 + len(names) // 40
    axes.set_xticks(range(0, len(names), every), names[::every])
    axes.tick_params(axis="x", rotation=90)
    figure.supylabel("largest difference / largest number", fontsize=POINTS)
    return figure


@rc_context(STYLE)
def svg(figure: Figure) -> str:
    """The figure inside an address."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", transparent=True)
    return _address(file, "svg+xml")


def photo(picture: Picture) -> str:
    """The image as the model sees it, inside an address."""
    return _address(_pixels(picture.pixels, cmap="gray", vmin=0, vmax=1), "png")


def drift_map(picture: Picture, name: str, top: float) -> str:
    """A pixel for each patch, coloured by its drift under a method; colours end at ``top``."""
    return _address(_pixels(picture.maps[name], cmap="viridis", vmin=0, vmax=top), "png")


def colour_bar() -> str:
    """All colours of a map, from left to right."""
    return _address(_pixels(torch.linspace(0, 1, 256)[None], cmap="viridis"), "png")


def scale(pictures: Sequence[Picture]) -> float:
    """Where the maps' colours end: the largest value of the first method shown."""
    largest = 1e-6
    for picture in pictures:
        first = next(iter(picture.maps.values()))
        largest = max(largest, first.max().item())
    return largest


def _pixels(values: torch.Tensor, **colours: Any) -> io.BytesIO:
    file = io.BytesIO()
    imsave(file, values.numpy(), format="png", **colours)
    return file


def _address(file: io.BytesIO, kind: str) -> str:
    content = base64.b64encode(file.getvalue()).decode("ascii")
    return f"data:image/{kind};base64,{content}"
