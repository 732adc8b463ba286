"""The pictures of the pages: compiled graphs and three conventions as SVG, the drift on the digits."""

from typing import Any

import torch
from torch.nn import functional as F

from timm_naflex_fast.commands.measure.contenders import BASELINE
from timm_naflex_fast.commands.measure.drift.plots import curves
from timm_naflex_fast.commands.measure.drift.survey import GridDrift

from .results import OURS, RESULTS, ROOT, read_one

INK = {"graphs.svg": "#1f2328", "graphs_dark.svg": "#e6edf3"}  # on a light page, on a dark one
BOX = 28
GAP = 16

TABLE_LENGTH = 8  # cells in the row of a table that the picture of conventions shows
GRID_LENGTH = 3
CELL = 40
# What ``F.interpolate`` is told, with the words above the row.
CONVENTIONS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("as the weights were trained: antialiased", dict(antialias=True)),
    ("without antialiasing (grid_sample): cells are skipped", dict()),
    ("corners aligned: positions are moved", dict(align_corners=True)),
)
DARK = (
    '<style>@media (prefers-color-scheme: dark){[fill="#1f2328"]{fill:#e6edf3}'
    '[fill="#ffffff"]{fill:#0d1117}[fill="#ddf4ff"]{fill:#1c4069}[stroke="#57606a"]{stroke:#9198a1}}'
    "</style>"
)


def graphs_picture(ink: str) -> str:
    """The compiled graphs of a training run as boxes, with a mark at each break between two."""
    shown = {BASELINE: "timm's loop", OURS: "this package"}
    rows = {}
    for row in read_one("graphs")["rows"]:
        if row["library"] == "timm" and row["way"] == "compile, four lengths":
            rows[row["contender"]] = row

    parts = []
    for y, (name, words) in zip((18, 88), shown.items()):
        count = rows[name]["graphs"]
        breaks = rows[name]["breaks"]
        said = f"{words}: {count} graphs, {breaks} breaks"
        parts.append(f'<text x="0" y="{y}">{said}</text>')
        for i in range(count):
            left = i * (BOX + GAP)
            box = f'x="{left}" y="{y + 10}" width="{BOX}" height="{BOX}" rx="5"'
            parts.append(f'<rect {box} fill="#2da44e" fill-opacity="0.75"/>')
            if i < breaks:
                parts.append(
                    f'<text x="{left + BOX + 3}" y="{y + 29}" fill="#cf222e">&#215;</text>'
                )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-2 0 444 134" width="444" '
        f'font-family="system-ui, sans-serif" font-size="15" fill="{ink}" role="img">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def draw_graphs() -> None:
    """Draw the picture of graphs, for light and dark pages."""
    for file, ink in INK.items():
        (ROOT / "docs" / file).write_text(graphs_picture(ink))


def conventions_picture() -> str:
    """Which cells of a table's row each cell of a shorter row reads, and with which weight."""
    width = TABLE_LENGTH * CELL
    parts = []
    for i, (words, options) in enumerate(CONVENTIONS):
        top = 20 + 138 * i
        parts.append(f'<text x="0" y="{top}">{words}</text>')
        units = torch.eye(TABLE_LENGTH)[:, None, None]  # (n0, 1, 1, n0)
        resized = F.interpolate(units, size=(1, GRID_LENGTH), mode="bilinear", **options)
        weights = resized[:, 0, 0].T.tolist()  # (n, n0)

        # Lines first: the boxes hide their ends.
        middles = [width * (row + 0.5) / GRID_LENGTH for row in range(GRID_LENGTH)]
        for middle, row in zip(middles, weights):
            for column, weight in enumerate(row):
                if weight < 0.005:
                    continue
                read_at = CELL * (column + 0.5)
                ends = f'x1="{middle:.1f}" y1="{top + 78}" x2="{read_at:.1f}" y2="{top + 38}"'
                parts.append(f'<line {ends} stroke="#1a7f37" stroke-width="{12 * weight:.1f}"/>')
        for column in range(TABLE_LENGTH):
            fill = "#ddf4ff"
            if all(row[column] < 0.005 for row in weights):
                fill = "#ffffff"
            box = f'x="{CELL * column + 2}" y="{top + 12}" width="{CELL - 4}" height="26" rx="4"'
            parts.append(f'<rect {box} fill="{fill}" stroke="#57606a"/>')
        for middle in middles:
            box = f'x="{middle - 27:.1f}" y="{top + 78}" width="54" height="26" rx="4"'
            parts.append(f'<rect {box} fill="#ddf4ff" stroke="#57606a"/>')
        for y, said in ((top + 31, "the table: 8 cells"), (top + 97, "the grid: 3 cells")):
            parts.append(f'<text x="{width + 12}" y="{y}" font-size="14">{said}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-4 0 464 408" width="464" '
        f'font-family="system-ui, sans-serif" font-size="15" fill="#1f2328" role="img" '
        f'aria-label="which cells of the table each cell of a smaller grid reads">{DARK}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def draw_conventions() -> None:
    """Draw the picture of three conventions, for light and dark pages."""
    (ROOT / "docs" / "conventions.svg").write_text(conventions_picture())


def draw_drift() -> None:
    """Draw the picture of drift on the digits."""
    grids = [GridDrift(**grid) for grid in read_one("drift/digits/report")["survey"]["grids"]]
    picture = curves(grids, ("grid_sample", OURS))
    picture.savefig(RESULTS / "drift" / "digits" / "drift.png", dpi=130, transparent=True)
