"""Two plots of result files: time over batch size, and how many times faster than timm each strategy is.

uv run benchmarks/plots.py results/speed/batches_train.json [more files] --out DIR
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timm_naflex_fast.measure.bench.race import BASELINE, PLAIN_ADD, Row
from timm_naflex_fast.measure.style import COLOURS, INK, panels

FEW = {"stock", "timm-flag-bilinear", "interpolate_cached", "grid_sample", "matmul", PLAIN_ADD}


def plot(rows: Sequence[Row], folder: str | Path) -> list[Path]:
    """Write ``time_over_batch.png`` (where more than one batch size ran) and ``times_faster.png`` into ``folder``.

    Returns:
        The files written.
    """
    folder, found = Path(folder), []
    folder.mkdir(parents=True, exist_ok=True)
    if _several_batches(rows):
        found.append(time_over_batch(rows, folder / "time_over_batch.png"))
    if any(row.times_faster is not None and row.contender not in (BASELINE, PLAIN_ADD) for row in rows):
        found.append(times_faster(rows, folder / "times_faster.png"))
    return found


def time_over_batch(rows: Sequence[Row], path: str | Path) -> Path:
    """Log-log: milliseconds per step over images per batch, a line per contender, a panel per workload and phase."""
    several = _several_batches(rows)
    workloads = list(dict.fromkeys(row.workload for row in several))
    kinds = list(dict.fromkeys(map(_kind, several)))
    figure, axes = panels(len(kinds), len(workloads), 6.4, 4.4)
    for across, kind in zip(axes, kinds):
        for panel, workload in zip(across, workloads):
            here = [row for row in several if row.workload == workload and _kind(row) == kind]
            panel.set_title(f"{workload}, {_words(kind, several)}")
            panel.set(xlabel="batch size (images)", ylabel="time of one step (ms)")
            if here:
                _lines(panel, here)
    return _save(figure, path)


def _lines(panel: Any, rows: Sequence[Row]) -> None:
    lines = {name: _line(rows, name) for name in dict.fromkeys(row.contender for row in rows)}
    ours = {row.contender for row in rows if row.ours}
    for name, line in lines.items():
        style = ":" if name == PLAIN_ADD else "-" if name in ours else "--"
        panel.plot(*zip(*line), style, marker="o", markersize=4, color=COLOURS[name])
    panel.set(xscale="log", yscale="log")
    batches = sorted({row.batch for row in rows})
    panel.set_xticks(batches, [str(batch) for batch in batches])
    panel.minorticks_off()
    _plain_numbers(panel.yaxis)
    _name_ends(panel, lines)


def times_faster(rows: Sequence[Row], path: str | Path) -> Path:
    """Bars, log scale: times faster than stock, per workload at the largest batch that stock ran; 1 is as fast."""
    compared = [row for row in rows if row.times_faster is not None and row.contender != PLAIN_ADD]
    workloads = list(dict.fromkeys(row.workload for row in compared))
    kinds = list(dict.fromkeys(map(_kind, compared)))
    names = [name for name in dict.fromkeys(row.contender for row in compared) if name != BASELINE]
    figure, axes = panels(len(kinds), 1, max(7.0, 0.9 + 0.3 * len(names) * len(workloads)), 2.9)
    for (panel,), kind in zip(axes, kinds):
        labels = []
        for place, workload in enumerate(workloads):
            here = [row for row in compared if row.workload == workload and _kind(row) == kind]
            batch = max((row.batch for row in here), default=0)
            labels.append(f"{workload}\nB={batch}" if batch else workload)
            _bars(panel, place, [row for row in here if row.batch == batch], names)
        panel.axhline(1, color=COLOURS[BASELINE], linewidth=1)
        panel.set(yscale="log", title=_words(kind, compared), ylabel="times faster than stock")
        _plain_numbers(panel.yaxis)
        panel.set_xticks(range(len(workloads)), labels)
        panel.margins(y=0.15)
        panel.grid(False, axis="x")
    handles = [_swatch(name) for name in names]
    figure.legend(handles, names, loc="outside lower center", ncols=min(4, len(names)), frameon=False, labelcolor=INK)
    return _save(figure, path)


def _bars(panel: Any, place: int, rows: Sequence[Row], names: list[str]) -> None:
    """A workload's bars around ``place``, each from 1 up, or down where it is slower."""
    width = 0.8 / len(names)
    for row in (row for row in rows if row.contender in names):
        at = place + width * (names.index(row.contender) - (len(names) - 1) / 2)
        ratio = row.times_faster or 1.0
        panel.bar(at, ratio - 1, 0.92 * width, bottom=1, color=COLOURS[row.contender])
        up = ratio >= 1
        panel.annotate(
            f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.1f}" if up else f"{ratio:.2f}",
            (at, ratio),
            xytext=(0, 2 if up else -2),
            textcoords="offset points",
            ha="center",
            va="bottom" if up else "top",
            fontsize=7,
            color=INK,
        )


def _kind(row: Row) -> tuple[str, str, str]:
    return row.suite, row.phase, row.dtype


def _words(kind: tuple[str, str, str], rows: Sequence[Row]) -> str:
    """The phase, with suite and dtype where the rows have more than one of them."""
    suite, phase, dtype = kind
    words = [suite] * (len({row.suite for row in rows}) > 1) + [phase]
    return ", ".join(words + [dtype] * (len({row.dtype for row in rows}) > 1))


def _several_batches(rows: Sequence[Row]) -> list[Row]:
    """The rows of workloads and phases that ran at more than one batch size."""
    batches: dict[Any, set[int]] = {}
    for row in rows:
        batches.setdefault((row.workload, _kind(row)), set()).add(row.batch)
    return [row for row in rows if len(batches[row.workload, _kind(row)]) > 1]


def _line(rows: Sequence[Row], contender: str) -> list[tuple[int, float]]:
    return sorted({row.batch: row.median_ms for row in rows if row.contender == contender}.items())


def _name_ends(panel: Any, lines: dict[str, list[tuple[int, float]]]) -> None:
    """Write each contender's name at the end of its line, moved apart where two would overlap."""
    low, high = (math.log(value) for value in panel.get_ylim())
    for right in {line[-1][0] for line in lines.values()}:
        ends = {name: math.log(line[-1][1]) for name, line in lines.items() if line[-1][0] == right}
        for name, y in _apart(ends, 0.055 * (high - low)).items():
            panel.annotate(
                name,
                (right, math.exp(y)),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=COLOURS[name],
                annotation_clip=False,
            )


def _apart(heights: dict[str, float], gap: float) -> dict[str, float]:
    """The heights, each moved as little as needed for ``gap`` between neighbours."""
    groups: list[list[str]] = []
    centres: list[float] = []
    for name in sorted(heights, key=lambda name: heights[name]):
        groups.append([name])
        centres.append(heights[name])
        while len(groups) > 1 and centres[-1] - centres[-2] < gap * (len(groups[-1]) + len(groups[-2])) / 2:
            groups[-2:] = [groups[-2] + groups[-1]]
            centres[-2:] = [sum(heights[member] for member in groups[-1]) / len(groups[-1])]
    return {
        name: centre + gap * (place - (len(group) - 1) / 2)
        for group, centre in zip(groups, centres)
        for place, name in enumerate(group)
    }


def _plain_numbers(axis: Any) -> None:
    """10 and 0.1 rather than powers of ten, and 2 and 5 between where there is room."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 100 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _swatch(name: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=COLOURS[name])


def _save(figure: Any, path: str | Path) -> Path:
    figure.savefig(path, dpi=130, transparent=True)
    return Path(path)


def main() -> None:
    """Draw what the result files hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--out", default=".", metavar="DIR")
    options = parser.parse_args()
    rows = [Row(**row) for path in options.files for row in json.loads(Path(path).read_text())["rows"]]
    print(f"written: {', '.join(map(str, plot(rows, options.out)))}")


if __name__ == "__main__":
    main()
