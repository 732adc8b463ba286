"""The report's pictures as addresses (data:...) for a page's <img>.

Plots have no background, and are as wide as a phone shows them without scaling. No pyplot: nothing
global changes and no display is needed.
"""

import base64
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, product
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.image import imsave

from ..contenders import BASELINE

INK = "#7d8590"  # a middle tone, readable on light and dark pages
FAINT = "#7d859055"
WIDTH = 3.8  # inches: 365 pixels
TONE = "#2f81f7"  # of marks
STYLE: dict[str, Any] = {
    "font.size": 9,  # points: 12 pixels
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "svg.fonttype": "none",  # words stay words
}


@rc_context(STYLE)
def curves(grids: Sequence[dict[str, Any]], modes: Sequence[str], top: float) -> Figure:
    """Drift of the embeddings over downsampling, a mark per patch grid and a panel per mode.

    ``top``: the end of the vertical axis, in percent.
    """
    figure = Figure((WIDTH * len(modes), 2.6), layout="constrained")
    figure.subplots(1, len(modes), sharex=True, sharey=True)
    shrinks = [grid["shrink"] for grid in grids]
    for axes, name in zip(figure.axes, modes):
        drift = [100 * grid["embed_rel_rms"][name] for grid in grids]
        axes.plot(shrinks, drift, "o", color=TONE, alpha=0.6, clip_on=False)
        axes.set_ylim(-0.04 * top, 1.04 * top)
        axes.set_title(name)
    figure.supxlabel("table cells per patch (above 1: shrunk)", fontsize="medium")
    figure.supylabel("embeddings off by, RMS (%)", fontsize="medium")
    return figure


def curve_of_each(grids: Sequence[dict[str, Any]], modes: Iterable[str]) -> dict[str, Figure]:
    """A plot of its own for each mode, all with the same axes; timm's own zeros have none."""
    shown = [name for name in modes if name != BASELINE]
    top = largest_drift(grids, shown)
    return {name: curves(grids, [name], top) for name in shown}


def largest_drift(grids: Sequence[dict[str, Any]], modes: Iterable[str]) -> float:
    """The largest drift of any grid, in percent; 1 where nothing drifts."""
    drifts = [grid["embed_rel_rms"][name] for name, grid in product(modes, grids)]
    return 100 * max(drifts) or 1.0


@rc_context(STYLE)
def stages(against: Mapping[str, Any]) -> dict[str, Figure]:
    """Largest difference from another library's pipeline at each stage: {mode: its plot}.

    A difference is a share of the stage's largest number. A dashed line is the largest difference
    that is rounding. Zeros stand at the left edge, because a logarithmic axis has none. All plots
    have the same axes.
    """
    modes = {BASELINE: against["stages"]}
    for name, one in against["modes"].items():
        modes[name] = one["stages"]
    first, last = _decades(chain(*modes.values()))
    left = 10.0**first
    figures = {}
    for name, lines in modes.items():
        rows = range(len(lines))
        shares = [max(_share(line, "largest"), left) for line in lines]
        limits = [max(_share(line, "limit"), left) for line in lines]
        figure = Figure((WIDTH, 0.9 + 0.2 * len(lines)), layout="constrained")
        axes = figure.subplots()
        axes.vlines(limits, [row - 0.5 for row in rows], [row + 0.5 for row in rows], INK, "dashed")
        axes.plot(shares, rows, "o-", color=TONE, linewidth=0.8, clip_on=False)
        axes.set_yticks(rows, [line["stage"] for line in lines])
        axes.invert_yaxis()  # the first stage at the top
        axes.set_xscale("log")
        axes.set_xlim(left, 10.0**last)
        ticks = range(first, last + 1, 2)
        axes.set_xticks([10.0**tick for tick in ticks], ["0", *(f"1e{tick}" for tick in ticks[1:])])
        axes.minorticks_off()
        axes.set_title(name)
        axes.set_xlabel("largest difference / largest number")
        figures[name] = figure
    return figures


def _share(line: Mapping[str, Any], what: str) -> float:
    """What was found at a stage as a share of its largest number."""
    share: float = line[what] / (line["scale"] or 1.0)
    return share


def _decades(lines: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """The powers of ten between which every share lies; the first is left to zeros."""
    powers = []
    for line in lines:
        for what in ("largest", "limit"):
            share = _share(line, what)
            if 0 < share < math.inf:
                powers.append(math.log10(share))
    if not powers:
        return -8, 0
    return math.floor(min(powers)) - 1, math.ceil(max(powers))


@rc_context(STYLE)
def svg(figure: Figure) -> str:
    """The figure inside an address."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", transparent=True)
    return _address(file, "svg+xml")


def pixels(values: torch.Tensor) -> str:
    """An image inside an address: RGB (h, w, 3), or numbers (h, w) in colours from 0 on."""
    file = io.BytesIO()
    imsave(file, values.numpy(), format="png", vmin=0)
    return _address(file, "png")


def _address(file: io.BytesIO, kind: str) -> str:
    content = base64.b64encode(file.getvalue()).decode("ascii")
    return f"data:image/{kind};base64,{content}"
