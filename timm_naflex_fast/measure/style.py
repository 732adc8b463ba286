"""How plots look: one colour per contender, middle tones and no background, readable on light and dark pages."""

from __future__ import annotations

from itertools import cycle
from typing import Any

from .contenders import CONTENDERS, PLAIN_ADD

INK, FAINT = "#7d8590", "#7d859055"
TONES = "#e5534b #2da44e #c9880a #2f81f7 #d4679c #a371f7 #b0704f #1b9aaa #8a9a1b #5a8f7b".split()
COLOURS = {**dict(zip(CONTENDERS, cycle(TONES))), PLAIN_ADD: INK}
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
