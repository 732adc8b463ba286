"""The report as Markdown: the tables, without pictures."""

from __future__ import annotations

from pathlib import Path

from .data import COLUMNS, Report, cells, facts, groups, percent


def write_markdown(path: str | Path, report: Report) -> None:
    """Write the verdict, the facts, and the tables per contender, block and grid."""
    Path(path).write_text(render(report), encoding="utf-8")


def render(report: Report) -> str:
    """The whole file's text."""
    survey = report.survey
    leaders = [(group[0], " = ".join(f"`{name}`" for name in group)) for group in groups(survey) if group]
    depths = range(len(next(iter(survey.blocks.values()))))
    blocks = [[f"{i + 1}", *(percent(survey.blocks[name][i], 2) for name, _ in leaders)] for i in depths]
    before = ["embedding", *(percent(survey.drift[name].embed_rel_rms, 2) for name, _ in leaders)]
    sizes = [
        [
            f"{grid.grid[0]}x{grid.grid[1]}",
            f"{grid.images:,}",
            f"{grid.aspect:.2f}",
            f"{grid.shrink:.2f}",
            *(percent(grid.embed_rel_rms[name], 2) for name, _ in leaders),
        ]
        for grid in survey.grids
    ]
    drawn = [label for _, label in leaders]
    lines = [f"# Drift of {report.model}", "", f"**{report.verdict}**", ""]
    lines += [f"- {label}: {_code(label, words)}" for label, words in facts(report)]
    lines += ["", f"## Drift from `{survey.baseline}`", ""]
    lines += _table(COLUMNS, [(f"`{row[0]}`", *row[1:]) for row in (cells(report, name) for name in survey.drift)])
    lines += [f"Not measured: `{name}`, {why}." for name, why in survey.left_out.items()]
    lines += ["", "## Per block: relative RMS of the patch tokens", "", f"Weights: {report.weights}.", ""]
    lines += _table(["after block", *drawn], [before, *blocks])
    lines += ["", "## Per patch grid: relative RMS of the embeddings", "", f"Weights: {report.weights}.", ""]
    lines += _table(["grid", "images", "width : height", "table cells per patch", *drawn], sizes)
    if report.skipped:
        lines += ["", "## Not readable as images", "", *(f"- {line}" for line in report.skipped)]
    lines += ["", "The plots and the maps over the patches are in report.html, all figures in report.json."]
    return "\n".join(lines) + "\n"


def _code(label: str, words: str) -> str:
    return f"`{words}`" if label == "Command" else words


def _table(head: list[str] | tuple[str, ...], rows: list[list[str]] | list[tuple[str, ...]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines] + [""]
