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

from ..contenders import BASELINE

INK = "#7d8590"  # a middle tone, readable on light and dark pages
FAINT = "#7d859055"
WIDTH = 9.0  # inches
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
def curves(grids: Sequence[dict[str, Any]], modes: Iterable[str]) -> Figure:
    """Drift of the embeddings over downsampling, a mark per patch grid.

    Each mode has a panel of its own, so no mark hides another's; timm's own zeros have none.
    """
    shown = [name for name in modes if name != BASELINE]
    figure = Figure((WIDTH, 3), layout="constrained")
    figure.subplots(1, len(shown), sharex=True, sharey=True)
    shrinks = [grid["shrink"] for grid in grids]
    for axes, name in zip(figure.axes, shown):
        drift = [100 * grid["embed_rel_rms"][name] for grid in grids]
        axes.plot(shrinks, drift, "o", color=TONE, alpha=0.6, clip_on=False)
        axes.set_title(name)
    figure.supxlabel("table cells per patch (above 1: shrunk)")
    figure.supylabel("embeddings off by, RMS (%)")
    return figure


@rc_context(STYLE)
def stages(against: Mapping[str, Any]) -> Figure:
    """Largest difference from another library's pipeline over the stages, a panel per mode.

    Each is a share of the stage's largest number; one of 0 has no mark.
    """
    modes = {BASELINE: against, **against["modes"]}
    figure = Figure((WIDTH, 1.2 + 1.3 * len(modes)), layout="constrained")
    figure.subplots(len(modes), sharex=True, sharey=True)
    for axes, (name, one) in zip(figure.axes, modes.items()):
        names = [stage["stage"] for stage in one["stages"]]
        shares = [stage["largest"] / (stage["scale"] or 1.0) for stage in one["stages"]]
        axes.plot(names, shares, "o-", color=TONE, linewidth=0.8)
        axes.set_yscale("log", nonpositive="mask")
        axes.set_title(name)
    axes.tick_params(axis="x", rotation=90)
    figure.supylabel("largest difference / largest number")
    return figure


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
