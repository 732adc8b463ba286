"""How plots look: one colour per contender, middle tones and no background, readable on light and dark pages."""

from __future__ import annotations

from typing import Any

INK, FAINT = "#7d8590", "#7d859055"
COLOURS = {
    "stock": "#e5534b",
    "matmul": "#2f81f7",
    "interpolate_cached": "#2da44e",
    "grid_sample": "#c9880a",
    "plain-add": INK,
    "timm-flag-bilinear": "#d4679c",
    "timm-flag-bicubic": "#a371f7",
    "issue-2514-zeros": "#b0704f",
    "hf-siglip2": "#1b9aaa",
}
INKED = ("text.color", "axes.edgecolor", "axes.titlecolor", "axes.labelcolor", "xtick.color", "ytick.color")
BARE = ("axes.spines.top", "axes.spines.right")
LOOK = {
    **dict.fromkeys(INKED, INK),
    **dict.fromkeys(BARE, False),
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": FAINT, "grid.linewidth": 0.5},
}


def panels(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure and its (rows, columns) array of axes; sizes in inches per panel. Save it with ``transparent=True``.

    It uses no pyplot, so nothing global changes and no display is needed.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(LOOK):
        figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
        return figure, figure.subplots(rows, columns, squeeze=False)
