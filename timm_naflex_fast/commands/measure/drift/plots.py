"""The report's pictures as addresses (data:...) for a page's <img>.

Plots have no background, and are as wide as a phone shows them without scaling. No pyplot: nothing
global changes and no display is needed.

Tests: tests/commands/measure/drift/test_report.py.
"""

import base64
import io
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

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
def curves(grids: Sequence[dict[str, Any]], modes: Sequence[str]) -> Figure:
    """Drift of the embeddings over downsampling, a mark per patch grid and a panel per mode.

    The vertical axis has room for every mode that was measured, so plots of two modes compare.
    """
    largest = max(max(grid["embed_rel_rms"].values()) for grid in grids)
    shrinks = [grid["shrink"] for grid in grids]
    figure = Figure((WIDTH * len(modes), 2.6), layout="constrained")
    figure.subplots(1, len(modes), sharex=True, sharey=True)
    for axes, name in zip(figure.axes, modes):
        drift = [100 * grid["embed_rel_rms"][name] for grid in grids]
        axes.plot(shrinks, drift, "o", color=TONE, alpha=0.6, clip_on=False)
        axes.set_ylim(0, 115 * largest)  # percent
        axes.set_title(name)
    figure.supxlabel("table cells per patch (above 1: shrunk)", fontsize="medium")
    figure.supylabel("tokens off by, RMS (%)", fontsize="medium")
    return figure


@rc_context(STYLE)
def svg(figure: Figure) -> str:
    """The figure inside an address."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", transparent=True)
    content = base64.b64encode(file.getvalue()).decode("ascii")
    return f"data:image/svg+xml;base64,{content}"
