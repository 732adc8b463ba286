"""The report's plots as SVG text for a page: no background, and ink of the page's own colour."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from .data import Report, groups

COLOURS = ("#2f81f7", "#c9880a", "#e5534b", "#a371f7", "#1b9aaa", "#d4679c", "#2da44e", "#b0704f")
MARKERS = "osD^vPX*"
SIGNS = "●■◆▲▼✚✖★"
INK = "#010203"  # stands for the page's own colour


def require() -> None:
    """Raise RuntimeError unless matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RuntimeError("the plots of --out need matplotlib: pip install matplotlib") from error


def style(place: int) -> tuple[str, str, str]:
    """Colour, matplotlib marker and the same marker as a sign, of the group at ``place``."""
    return COLOURS[place % 8], MARKERS[place % 8], SIGNS[place % 8]


def plots(report: Report) -> dict[str, str]:
    """Each plot's SVG element, under its title.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    require()
    return {
        "Drift after each block": blocks(report),
        "Drift against aspect ratio": aspects(report),
        "Drift against downsampling": shrinks(report),
        "Drift of the pooled output": pooled(report),
    }


def blocks(report: Report) -> str:
    """Relative RMS of the patch tokens, in %, after the embedding (0) and after each block."""
    figure, panel = _panel("after block (0: the embedding)", "relative RMS drift (%)")
    survey = report.survey
    for place, group in _drawn(report):
        values = [survey.drift[group[0]].embed_rel_rms, *survey.blocks[group[0]]]
        _draw(panel, place, range(len(values)), values, "-")
    panel.xaxis.get_major_locator().set_params(integer=True)
    return _svg(figure, "blocks")


def aspects(report: Report) -> str:
    """Relative RMS of the embeddings, in %, over width : height of the grid, on a logarithmic axis."""
    figure, panel = _panel("width : height of the patch grid", "relative RMS drift (%)")
    _scatter(panel, report, [grid.aspect for grid in report.survey.grids])
    ticks = {1 / 4: "1:4", 1 / 3: "1:3", 1 / 2: "1:2", 1.0: "1:1", 2.0: "2:1", 3.0: "3:1", 4.0: "4:1"}
    _log_axis(panel, ticks)
    return _svg(figure, "aspects")


def shrinks(report: Report) -> str:
    """Relative RMS of the embeddings, in %, over table cells per patch along the axis that is shrunk more."""
    figure, panel = _panel("table cells per patch (above 1: downsampled)", "relative RMS drift (%)")
    _scatter(panel, report, [grid.shrink for grid in report.survey.grids])
    _log_axis(panel, {value: f"{value:g}" for value in (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16)})
    return _svg(figure, "shrinks")


def pooled(report: Report) -> str:
    """Bars: mean 1 - cosine of the pooled outputs, per contender, on a logarithmic axis; none where it is zero."""
    drift = report.survey.drift
    names = [name for name in drift if name != report.survey.baseline]
    figure, panel = _panel("1 - cosine, mean over images", "", 1.1 + 0.2 * len(names))
    places = {name: place for place, group in enumerate(groups(report.survey)) for name in group}
    values = [drift[name].pooled_cosine_distance for name in names]
    seen = [value for value in values if value > 0]
    low = min(seen, default=1e-3) / 10
    for row, (name, value) in enumerate(zip(names, values)):
        if value > 0:
            panel.barh(row, value - low, left=low, color=style(places[name])[0], height=0.7)
        text = f"{value:.1e}" if value else "0"
        at = (max(value, low), row)
        panel.annotate(text, at, (3, 0), textcoords="offset points", va="center", fontsize=7, color=INK)
    panel.set(xscale="log", xlim=(low, max(seen, default=1e-2) * 10 ** (0.22 * _decades(low, seen))))
    panel.set_yticks(range(len(names)), names, fontsize=7)
    panel.set_ylim(len(names) - 0.4, -0.6)
    panel.grid(False, axis="y")
    return _svg(figure, "pooled")


def _decades(low: float, values: Sequence[float]) -> float:
    from math import log10

    return max(1.0, log10(max(values, default=low) / low))


def _drawn(report: Report) -> list[tuple[int, list[str]]]:
    return [(place, group) for place, group in enumerate(groups(report.survey)) if group]


def _scatter(panel: Any, report: Report, x: list[float]) -> None:
    for place, group in _drawn(report):
        _draw(panel, place, x, [grid.embed_rel_rms[group[0]] for grid in report.survey.grids], "none")


def _draw(panel: Any, place: int, x: Sequence[float], values: Sequence[float], line: str) -> None:
    colour, marker, _ = style(place)
    percents = [100 * value for value in values]
    panel.plot(x, percents, linestyle=line, linewidth=1.2, marker=marker, markersize=4, color=colour, alpha=0.85)


def _log_axis(panel: Any, ticks: dict[float, str]) -> None:
    """Logarithmic, with those of the ``ticks`` that lie in view."""
    from matplotlib.ticker import NullLocator

    panel.set_xscale("log")
    low, high = panel.get_xlim()
    if high < 1.5 * low:  # few values: room around them
        low, high = low / 1.4, high * 1.4
    panel.set_xlim(low, high)
    seen = {value: label for value, label in ticks.items() if low <= value <= high}
    panel.set_xticks(list(seen), list(seen.values()))
    panel.xaxis.set_minor_locator(NullLocator())


def _panel(x: str, y: str, height: float = 3.0) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    figure = Figure(figsize=(4.4, height), layout="constrained")
    panel = figure.subplots()
    panel.grid(True, color=INK, alpha=0.15, linewidth=0.6)
    panel.set_axisbelow(True)
    panel.set_xlabel(x, color=INK, fontsize=8.5)
    panel.set_ylabel(y, color=INK, fontsize=8.5)
    panel.tick_params(colors=INK, which="both", labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(INK)
    return figure, panel


def _svg(figure: Any, name: str) -> str:
    """The figure as an element that can stand in a page beside others: ids of its own, nothing from outside."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'^<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', text)
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text))
    kept = {one for pair in used for one in pair if one}

    def identity(found: re.Match[str]) -> str:
        return f' id="{name}-{found[1]}"' if found[1] in kept else ""

    text = re.sub(r'\sid="([^"]+)"', identity, text)
    text = re.sub(r'url\(#|href="#', lambda found: found[0] + name + "-", text)
    return re.sub(r"\s*\n\s*", "\n", text).replace(INK, "currentColor").strip()
