"""The pictures of the pages: compiled graphs as SVG, and the drift on the digits."""

from timm_naflex_fast.measure.contenders import BASELINE
from timm_naflex_fast.measure.drift.plots import curves
from timm_naflex_fast.measure.drift.survey import GridDrift

from .results import OURS, RESULTS, ROOT, read_one

INK = {"graphs.svg": "#1f2328", "graphs_dark.svg": "#e6edf3"}  # on a light page, on a dark one
BOX = 34
GAP = 22


def graphs_picture(ink: str) -> str:
    """The compiled graphs of a training run as boxes, with a mark at each break between two."""
    shown = {BASELINE: "timm's loop", OURS: "this package"}
    rows = {}
    for row in read_one("graphs")["rows"]:
        if row["library"] == "timm" and row["way"] == "compile, four lengths":
            rows[row["contender"]] = row

    parts = []
    for y, (name, words) in zip((8, 64), shown.items()):
        count = rows[name]["graphs"]
        breaks = rows[name]["breaks"]
        said = f"{words}: {count} graphs, {breaks} breaks"
        parts.append(f'<text x="0" y="{y + 22}">{said}</text>')
        for i in range(count):
            left = 260 + i * (BOX + GAP)
            box = f'x="{left}" y="{y}" width="{BOX}" height="{BOX}" rx="5"'
            parts.append(f'<rect {box} fill="#2da44e" fill-opacity="0.75"/>')
            if i < breaks:
                parts.append(
                    f'<text x="{left + BOX + 5}" y="{y + 23}" fill="#cf222e">&#215;</text>'
                )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 106" width="820" '
        f'font-family="system-ui, sans-serif" font-size="15" fill="{ink}" role="img">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def draw_graphs() -> None:
    """Draw the picture of graphs, for light and dark pages."""
    for file, ink in INK.items():
        (ROOT / "docs" / file).write_text(graphs_picture(ink))


def draw_drift() -> None:
    """Draw the picture of drift on the digits."""
    grids = [GridDrift(**grid) for grid in read_one("drift/digits/report")["survey"]["grids"]]
    picture = curves(grids, ("grid_sample", OURS))
    picture.savefig(RESULTS / "drift" / "digits" / "drift.png", dpi=130, transparent=True)
