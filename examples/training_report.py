"""The training study's words, tables and pictures, from its result files alone."""

from __future__ import annotations

import csv
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timm_naflex_fast.measure.style import COLOURS, FAINT, INK

STEPS_TO_COINCIDE, TOLERANCE = 200, 1e-4
NUDGED = "stock, one rounding away"  # timm's own code, started with one weight at the next float32
Record = dict[str, Any]


def read(folder: Path) -> Record:
    """The figures that training_study.py wrote."""
    return json.loads((folder / "study.json").read_text(encoding="utf-8"))


def percent(value: float) -> str:
    return f"{100 * value:.1f}"


def points(value: float) -> str:
    """A difference of accuracies, without a minus before nothing."""
    return f"{round(100 * value, 1) + 0.0:.1f}"


def spread(values: Sequence[float]) -> str:
    """Mean in percent, and the lowest and highest seed: "96.5 (96.1 to 97.0)"."""
    text = percent(statistics.fmean(values))
    return text if len(values) == 1 else f"{text} ({percent(min(values))} to {percent(max(values))})"


def cross_table(record: Record) -> list[str]:
    """Markdown: held-out accuracy, a row per training strategy, a column per evaluation strategy."""
    table = record["accuracy"]
    modes = list(next(iter(table.values())))
    lines = [f"| trained with | {' | '.join(f'evaluated with `{mode}`' for mode in modes)} |"]
    lines.append("| --- |" + " --- |" * len(modes))
    for name, row in table.items():
        label = "`stock`, one weight one rounding away" if name == NUDGED else f"`{name}`"
        lines.append(f"| {label} | {' | '.join(spread(row[mode]) for mode in modes)} |")
    return lines


def gaps(record: Record, first: tuple[str, str], second: tuple[str, str]) -> list[float]:
    """Accuracy of the first (trained with, evaluated with) less that of the second, seed by seed."""
    table = record["accuracy"]
    return [a - b for a, b in zip(table[first[0]][first[1]], table[second[0]][second[1]])]


def between(values: Sequence[float]) -> str:
    """ "1.2 to 1.9 points", or "1.2 points" where all agree."""
    low, high = points(min(values)), points(max(values))
    return f"{low} points" if low == high else f"{low} to {high} points"


def recovered_after(record: Record) -> list[int | None]:
    """Per seed the first evaluated step from which on grid_sample keeps what antialiasing gave; None if never."""
    tuning = record["fine_tuning"]
    before = [curve[0] for curve in tuning["matmul"]]
    return [
        next((step for place, step in enumerate(tuning["steps"]) if min(curve[place:]) >= goal), None)
        for goal, curve in zip(before, tuning["grid_sample"])
    ]


def conclusions(record: Record) -> list[str]:
    """What the figures say, sentence by sentence, and what they do not."""
    return [*_curves(record), _from_scratch(record), _swapped(record), _fine_tuning(record), _limits(record)]


def _curves(record: Record) -> list[str]:
    worst = {name: max(values) for name, values in record["largest_difference"].items()}
    steps = min(STEPS_TO_COINCIDE, record["plan"]["steps"])
    same = [name for name in ("interpolate_cached", "matmul") if worst[name] == 0]
    near = [name for name in ("interpolate_cached", "matmul") if worst[name] > 0]
    said = [f"`{name}`'s losses are timm's bit for bit" for name in same]
    said += [f"`{name}`'s are within {worst[name]:.0e} of timm's" for name in near]
    sentences = [
        f"Over the first {steps} steps {' and '.join(said)} (at most {TOLERANCE:.0e} is asserted); "
        f"`grid_sample`'s are up to {worst['grid_sample']:.2f} away."
    ]
    ours, nudged = record["first_apart"]["matmul"], record["first_apart"][NUDGED]
    if any(ours):
        sentences.append(
            f"Later the curves part: `matmul`'s differs by more than {TOLERANCE:.0e} from step {_steps(ours)} on. That "
            "is rounding, which training magnifies step by step: timm's own code, started with a single weight moved "
            f"to the next float32, is that far from itself from step {_steps(nudged)} on, and ends with accuracies "
            f"{_apart(record, NUDGED)} from the unmoved run's; `matmul`'s are {_apart(record, 'matmul')} from it."
        )
    return sentences


def _steps(values: Sequence[int | None]) -> str:
    """ "210 to 260", or where some seed has none, "210 or never"."""
    found = [value for value in values if value is not None]
    if not found:
        return "never"
    text = str(found[0]) if min(found) == max(found) else f"{min(found)} to {max(found)}"
    return text if len(found) == len(values) else f"{text} or never"


def _apart(record: Record, name: str) -> str:
    return between([abs(gap) for gap in gaps(record, (name, "stock"), ("stock", "stock"))])


def _from_scratch(record: Record) -> str:
    gap = gaps(record, ("grid_sample", "grid_sample"), ("stock", "stock"))
    noise = max(abs(value) for value in gaps(record, (NUDGED, "stock"), ("stock", "stock")))
    mean = statistics.fmean(gap)
    if min(gap) < 0 < max(gap):
        verdict = f"the seeds disagree on which is better, so {len(gap)} seeds do not tell"
    else:
        size = "no more than" if abs(mean) <= noise else "more than"
        verdict = f"{size} the {points(noise)} points that one rounding can change"
    return (
        f"Trained and evaluated with `grid_sample`, the model scores {points(abs(mean))} points "
        f"{'more' if mean >= 0 else 'less'} than trained and evaluated with timm's default (mean; "
        f"{between(gap)} by seed): {verdict}."
    )


def _swapped(record: Record) -> str:
    lost = [-gap for gap in gaps(record, ("stock", "grid_sample"), ("stock", "stock"))]
    other = [-gap for gap in gaps(record, ("grid_sample", "stock"), ("grid_sample", "grid_sample"))]
    exact = max(abs(gap) for mode in ("interpolate_cached", "matmul") for gap in _exchanged(record, mode))
    exchanged = "nothing" if exact == 0 else f"at most {100 * exact:.2f} points"
    return (
        f"Weights trained with antialiasing and evaluated with `grid_sample` lose {between(lost)}; weights trained "
        f"with `grid_sample` and evaluated with antialiasing lose {between(other)}; exchanging `stock`, "
        f"`interpolate_cached` and `matmul` for one another changes {exchanged}."
    )


def _exchanged(record: Record, mode: str) -> list[float]:
    return [gap for name in record["accuracy"] for gap in gaps(record, (name, mode), (name, "stock"))]


def _fine_tuning(record: Record) -> str:
    tuning = record["fine_tuning"]
    seeds, last = len(tuning["grid_sample"]), tuning["steps"][-1]
    found = [step for step in recovered_after(record) if step is not None]
    lost = [b[0] - a[0] for a, b in zip(tuning["grid_sample"], tuning["matmul"])]
    behind = [b[-1] - a[-1] for a, b in zip(tuning["grid_sample"], tuning["matmul"])]
    if found:
        when = f"after {_steps(found)} steps of {record['plan']['batch_size']} images" + (
            ""
            if len(found) == seeds
            else f" for {len(found)} of {seeds} seeds, and not within {last} steps for the rest"
        )
        said = f"reach the accuracy they had with antialiasing, and keep it, {when}"
    else:
        said = f"do not reach the accuracy they had with antialiasing within {last} steps"
    mean = statistics.fmean(behind)
    dip = max(curve[0] - min(curve) for curve in tuning["matmul"])
    return (
        f"Fine-tuned with `grid_sample`, weights trained with antialiasing start {between(lost)} down and {said}. "
        f"The same {last} steps with `matmul` end {points(abs(mean))} points {'higher' if mean >= 0 else 'lower'} "
        f"(mean; {between(behind)} by seed); on the way they fall up to {points(dip)} points below their start, so "
        "smaller differences say little."
    )


def _limits(record: Record) -> str:
    height, width = record["model"]["pos_embed_grid_size"]
    return (
        f"The limits: a model of {record['model']['depth']} blocks and {record['model']['embed_dim']} channels, digits "
        f"of 8x8 pixels, {record['plan']['steps']} steps, {len(record['plan']['seeds'])} seed(s), a {height}x{width} "
        "table that nearly every grid here shrinks; the recipe was chosen on the same held-out digits. How much "
        "antialiasing matters to a large model, or where grids are larger than the table, this does not say."
    )


def provenance_line(record: Record) -> str:
    return (
        f"Accuracy in percent on {record['held_out_images']:,} held-out images in {len(record['held_out_grids'])} "
        f"grids, mean of {len(record['plan']['seeds'])} seed(s) (lowest to highest); {record['machine']}, "
        f"{record['cpu_seconds'] / 60:.0f} CPU minutes; torch {record['torch']}, timm {record['timm']}; "
        f"{record['date']}, commit {record['commit']}; `{record['command']}`."
    )


def report(record: Record) -> str:
    """Cross table, conclusions and provenance, as Markdown."""
    lines = [*cross_table(record), "", *(f"- {sentence}" for sentence in conclusions(record))]
    return "\n".join([*lines, "", provenance_line(record)])


def draw(folder: Path) -> None:
    """Write losses.png and fine_tuning.png beside the result files, if matplotlib is installed.

    Transparent and in middle tones, so that they can be read on a light and on a dark page.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no pictures: pip install matplotlib")
        return
    _draw_losses(folder)
    _draw_fine_tuning(folder)


def _columns(path: Path) -> dict[str, list[float]]:
    with open(path, newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    return {name: [float(row[i]) for row in rows] for i, name in enumerate(header)}


def _axes(count: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6 * count, 4.0), layout="constrained")
    panels = figure.subplots(1, count, squeeze=False)[0]
    for panel in panels:
        panel.patch.set_alpha(0)
        panel.grid(True, color=FAINT, linewidth=0.5)
        panel.tick_params(colors=INK, which="both", labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["left", "bottom"]].set_color(INK)
        for text in (panel.title, panel.xaxis.label, panel.yaxis.label):
            text.set(color=INK, fontsize=9)
    return figure, panels


def _save(figure: Any, panel: Any, path: Path) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, labelcolor=INK, fontsize=8)
    figure.savefig(path, dpi=130, transparent=True)


def _seeds(curves: dict[str, list[float]], name: str) -> list[list[float]]:
    return [curve for column, curve in curves.items() if column.startswith(f"{name} seed ")]


def _draw_losses(folder: Path) -> None:
    record = read(folder)
    figure, (left, right) = _axes(2)
    means, first = _columns(folder / "losses.csv"), _columns(folder / "losses_first_steps.csv")
    styles = {"stock": "-", "interpolate_cached": (0, (2, 4)), "matmul": (0, (5, 5)), "grid_sample": "-", NUDGED: ":"}
    for name in record["accuracy"]:
        colour = COLOURS.get(name, INK)
        seeds = _seeds(means, name)
        left.plot(means["step"], [statistics.fmean(at) for at in zip(*seeds)], linestyle=styles[name], color=colour)
        worst = [
            max(abs(a - b) for a, b in zip(ours, stock))
            for ours, stock in zip(zip(*_seeds(first, name)), zip(*_seeds(first, "stock")))
        ]
        exact = not any(worst)
        label = f"{name} (no difference from stock)" if exact and name != "stock" else name
        shown = [value or math.nan for value in worst]  # a log scale has no zero
        right.plot(first["step"], shown, linestyle=styles[name], color=colour, label=label)
    left.set(xlabel="optimiser step", ylabel="training loss (nats)")
    left.set_title("loss, mean of the seeds", fontsize=10)
    right.axhline(TOLERANCE, color=INK, linewidth=1)
    right.annotate(f"{TOLERANCE:.0e}", (1, TOLERANCE), xytext=(2, 3), textcoords="offset points", color=INK, fontsize=8)
    right.set(xlabel="optimiser step", ylabel="difference of loss from stock's (nats)", yscale="log")
    right.set_title(f"first {len(first['step'])} steps, seed that differs most", fontsize=10)
    _save(figure, right, folder / "losses.png")


def _draw_fine_tuning(folder: Path) -> None:
    tuning = read(folder)["fine_tuning"]
    figure, (panel,) = _axes(1)
    for name in ("matmul", "grid_sample"):
        for seed, curve in enumerate(tuning[name]):
            label = f"fine-tuned and evaluated with {name}" if seed == 0 else None
            scores = [100 * score for score in curve]
            panel.plot(tuning["steps"], scores, marker="o", markersize=3, linewidth=1, color=COLOURS[name], label=label)
    panel.set(xlabel="steps of fine-tuning (root scale)", ylabel="held-out accuracy (%)", xlim=(0, None))
    panel.set_xscale("function", functions=(lambda step: abs(step) ** 0.5, lambda root: root**2))
    panel.set_xticks(tuning["steps"], [str(step) for step in tuning["steps"]])
    panel.minorticks_off()
    panel.set_title("from weights trained with antialiasing, a line per seed", fontsize=10)
    _save(figure, panel, folder / "fine_tuning.png")
