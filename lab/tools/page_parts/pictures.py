"""The pictures of the pages that show results: compiled graphs as SVG, the drift on the digits."""

from lab.tools.page_parts.results import OURS, RESULTS, ROOT, read_one
from timm_naflex_fast.commands.measure.contenders import BASELINE
from timm_naflex_fast.commands.measure.drift.report import render

INK = {"graphs.svg": "#1f2328", "graphs_dark.svg": "#e6edf3"}  # on a light page, on a dark one
BOX = 28
GAP = 16


def graphs_picture(ink: str) -> str:
    """The compiled graphs of a training run as boxes, with a mark at each break between two."""
    shown = {BASELINE: "timm's loop", OURS: "this package"}
    rows = {}
    for row in read_one("graphs")["rows"]:
        if row["library"] == "timm" and row["way"] == "compile, four lengths":
            rows[row["contender"]] = row

    parts = []
    for y, (name, words) in zip((18, 104), shown.items()):
        row = rows[name]
        said = f"{words}: {row['graphs']} graphs, {row['breaks']} breaks"
        parts.append(f'<text x="0" y="{y}">{said}</text>')
        # A forward pass is a chain of graphs; another length of tokens compiles a chain of its own.
        first = row["graphs"] - row["recompiled"]
        chains = {"first length": (0, first), "other lengths": (240, row["recompiled"])}
        for length, (start, count) in chains.items():
            parts.append(f'<text x="{start}" y="{y + 56}" font-size="13">{length}</text>')
            for i in range(count):
                left = start + i * (BOX + GAP)
                box = f'x="{left}" y="{y + 10}" width="{BOX}" height="{BOX}" rx="5"'
                parts.append(f'<rect {box} fill="#2da44e" fill-opacity="0.75"/>')
                if i < count - 1:
                    cross = f'x="{left + BOX + 3}" y="{y + 29}" fill="#cf222e"'
                    parts.append(f"<text {cross}>&#215;</text>")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-2 0 464 172" width="464" '
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
    report = read_one("drift/digits/report")
    names = ("grid_sample", OURS)
    picture = render("dots.svg.j2", grids=report["survey"]["grids"], names=names)
    (RESULTS / "drift" / "digits" / "drift.svg").write_text(picture)
