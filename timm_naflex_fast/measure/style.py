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


def require(module: str, option: str) -> None:
    """Raise RuntimeError unless ``module`` is installed; ``option`` is what needs it, e.g. "--out"."""
    try:
        __import__(module)
    except ImportError as error:
        raise RuntimeError(f"{option} needs {module}: pip install {module}") from error


def panels(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure without background and its (rows, columns) array of axes; sizes in inches per panel.

    It uses no pyplot, so nothing global changes and no display is needed. Save it with ``transparent=True``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for panel in axes.flat:
        panel.patch.set_alpha(0)
        panel.grid(True, color=FAINT, linewidth=0.5)
        panel.set_axisbelow(True)
        panel.tick_params(colors=INK, which="both")
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(INK)
        for text in (panel.title, panel.xaxis.label, panel.yaxis.label):
            text.set_color(INK)
    return figure, axes
