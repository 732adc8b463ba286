"""Two pictures of a result: time over batch size, and how many times faster than timm each strategy is.

No background and middle tones, so that they can be read on a light and on a dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .race import BASELINE, FLOOR, Row

INK, FAINT = "#7d8590", "#7d859055"
COLOURS = {
    BASELINE: "#e5534b",
    "matmul": "#2f81f7",
    "interpolate_cached": "#2da44e",
    "grid_sample": "#c9880a",
    FLOOR: INK,
    "stock-bilinear": "#d4679c",
    "stock-bicubic": "#a371f7",
    "issue-2514": "#b0704f",
    "hf-siglip2": "#1b9aaa",
}
PEERS_STYLE, OURS_STYLE = "--", "-"


def require() -> None:
    """Raise RuntimeError unless matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RuntimeError("--plot needs matplotlib: pip install matplotlib") from error


def plot(rows: Sequence[Row], folder: str | Path) -> list[Path]:
    """Write ``time_over_batch.png`` (where more than one batch size ran) and ``times_faster.png`` into ``folder``.

    Returns:
        The files written.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    require()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    if _several_batches(rows):
        found.append(time_over_batch(rows, folder / "time_over_batch.png"))
    if any(row.times_faster is not None and row.contender not in (BASELINE, FLOOR) for row in rows):
        found.append(times_faster(rows, folder / "times_faster.png"))
    return found


def time_over_batch(rows: Sequence[Row], path: str | Path) -> Path:
    """Log-log: milliseconds per step over images per batch, a line per contender, a panel per workload and phase."""
    several = _several_batches(rows)
    workloads = list(dict.fromkeys(row.workload for row in several))
    phases = list(dict.fromkeys(row.phase for row in several))
    figure, panels = _panels(len(phases), len(workloads), 6.4, 4.4)
    for across, phase in zip(panels, phases):
        for panel, workload in zip(across, workloads):
            here = [row for row in several if (row.workload, row.phase) == (workload, phase)]
            lines = {name: _line(here, name) for name in dict.fromkeys(row.contender for row in here)}
            for name, line in lines.items():
                style = ":" if name == FLOOR else OURS_STYLE if _is_ours(here, name) else PEERS_STYLE
                panel.plot(*zip(*line), style, marker="o", markersize=4, color=_colour(name), label=name)
            panel.set(xscale="log", yscale="log", title=f"{workload}, {phase}")
            batches = sorted({row.batch for row in here})
            panel.set_xticks(batches, [str(batch) for batch in batches])
            panel.minorticks_off()
            panel.set(xlabel="batch size (images)", ylabel="time of one step (ms)")
            _plain_numbers(panel.yaxis)
            _name_ends(panel, lines)
    return _save(figure, path)


def times_faster(rows: Sequence[Row], path: str | Path) -> Path:
    """Bars, log scale: times faster than stock, per workload at the largest batch that stock ran; 1 is as fast."""
    compared = [row for row in rows if row.times_faster is not None and row.contender != FLOOR]
    workloads = list(dict.fromkeys(row.workload for row in compared))
    phases = list(dict.fromkeys(row.phase for row in compared))
    names = [name for name in dict.fromkeys(row.contender for row in compared) if name != BASELINE]
    figure, panels = _panels(len(phases), 1, max(7.0, 0.9 + 0.3 * len(names) * len(workloads)), 2.9)
    thickness = 0.8 / len(names)
    for (panel,), phase in zip(panels, phases):
        shown = {}
        for place, workload in enumerate(workloads):
            here = [row for row in compared if (row.workload, row.phase) == (workload, phase)]
            batch = max((row.batch for row in here), default=0)
            shown[workload] = f"{workload}\nB={batch}" if here and batch else workload
            for row in (row for row in here if row.batch == batch and row.contender in names):
                at = place + thickness * (names.index(row.contender) - (len(names) - 1) / 2)
                ratio = row.times_faster or 1.0
                panel.bar(at, ratio - 1, 0.92 * thickness, bottom=1, color=_colour(row.contender))
                up = ratio >= 1
                panel.annotate(
                    f"{ratio:.0f}" if ratio >= 9.5 else f"{ratio:.1f}" if ratio >= 1 else f"{ratio:.2f}",
                    (at, ratio),
                    xytext=(0, 2 if up else -2),
                    textcoords="offset points",
                    ha="center",
                    va="bottom" if up else "top",
                    fontsize=7,
                    color=INK,
                )
        panel.axhline(1, color=_colour(BASELINE), linewidth=1)
        panel.set(yscale="log", title=phase, ylabel="times faster than stock")
        _plain_numbers(panel.yaxis)
        panel.set_xticks(range(len(workloads)), list(shown.values()))
        panel.margins(y=0.15)
        panel.grid(False, axis="x")
    handles = [_swatch(name) for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(names)), frameon=False, labelcolor=INK)
    return _save(figure, path)


def _several_batches(rows: Sequence[Row]) -> list[Row]:
    """The rows of workloads and phases that ran at more than one batch size."""
    batches: dict[Any, set[int]] = {}
    for row in rows:
        batches.setdefault((row.workload, row.phase), set()).add(row.batch)
    return [row for row in rows if len(batches[row.workload, row.phase]) > 1]


def _line(rows: Sequence[Row], contender: str) -> list[tuple[int, float]]:
    return sorted({row.batch: row.median_ms for row in rows if row.contender == contender}.items())


def _is_ours(rows: Sequence[Row], contender: str) -> bool:
    return any(row.ours for row in rows if row.contender == contender)


def _colour(name: str) -> str:
    spare = ("#6e7f0e", "#8957e5", "#0a7c86", "#bf5b17")
    return COLOURS.get(name) or COLOURS.get(name.split()[0]) or spare[sum(map(ord, name)) % len(spare)]


def _name_ends(panel: Any, lines: dict[str, list[tuple[int, float]]]) -> None:
    """Write each contender's name at the end of its line, moved up where two would overlap."""
    low, high = panel.get_ylim()
    step = (high / low) ** 0.055
    right = max(line[-1][0] for line in lines.values())
    lowest = 0.0
    for name, line in sorted(lines.items(), key=lambda item: item[1][-1][1]):
        y = max(line[-1][1], lowest)
        lowest = y * step
        panel.annotate(
            name,
            (right, y),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=_colour(name),
            annotation_clip=False,
        )


def _plain_numbers(axis: Any) -> None:
    """10 and 0.1 rather than powers of ten, and 2 and 5 between where there is room."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 100 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _swatch(name: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=_colour(name))


def _panels(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # no pyplot: nothing global, no display

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    for panel in panels.flat:
        panel.patch.set_alpha(0)
        panel.grid(True, color=FAINT, linewidth=0.5)
        panel.tick_params(colors=INK, which="both")
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(INK)
        for text in (panel.title, panel.xaxis.label, panel.yaxis.label):
            text.set_color(INK)
    return figure, panels


def _save(figure: Any, path: str | Path) -> Path:
    figure.savefig(path, dpi=130, transparent=True)
    return Path(path)
