"""The pictures of the pages that show results: compiled graphs as SVG, the drift on the digits."""

from matplotlib import rc_context
from matplotlib.figure import Figure

from timm_naflex_fast.commands.measure.contenders import BASELINE

from .results import OURS, RESULTS, ROOT, read_one

INK = {"graphs.svg": "#1f2328", "graphs_dark.svg": "#e6edf3"}  # on a light page, on a dark one
BOX = 28
GAP = 16
MIDDLE = "#7d8590"  # readable on light and dark pages
STYLE = {
    "font.size": 9,
    "text.color": MIDDLE,
    "axes.edgecolor": MIDDLE,
    "axes.labelcolor": MIDDLE,
    "xtick.color": MIDDLE,
    "ytick.color": MIDDLE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#7d859055",
    "grid.linewidth": 0.5,
}


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


@rc_context(STYLE)
def draw_drift() -> None:
    """Draw the drift on the digits over downsampling, a mark per patch grid and a panel per mode."""
    grids = read_one("drift/digits/report")["survey"]["grids"]
    shrinks = [grid["shrink"] for grid in grids]
    figure = Figure((7.6, 2.6), layout="constrained")
    figure.subplots(1, 2, sharex=True, sharey=True)
    for axes, name in zip(figure.axes, ("grid_sample", OURS)):
        drift = [100 * grid["embed_rel_rms"][name] for grid in grids]
        axes.plot(shrinks, drift, "o", color="#2f81f7", alpha=0.6, clip_on=False)
        axes.set_ylim(bottom=0)
        axes.set_title(name)
    figure.supxlabel("table cells per patch (above 1: shrunk)", fontsize="medium")
    figure.supylabel("tokens off by, RMS (%)", fontsize="medium")
    figure.savefig(RESULTS / "drift" / "digits" / "drift.png", dpi=130, transparent=True)
