"""The README's picture of drift: how far two contenders move the digits' embeddings, over the table's shrinkage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from timm_naflex_fast.measure.style import COLOURS, INK

SHOWN = {"grid_sample": "grid_sample (timm's fast flag)", "matmul": "matmul (this package)"}


def draw(report: dict[str, Any], path: Path) -> None:
    """Relative RMS of the embeddings in %, a mark per patch grid, no background."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.4), layout="constrained", dpi=130)
    panel = figure.subplots()
    grids = report["survey"]["grids"]
    for name, label in SHOWN.items():
        values = [100 * grid["embed_rel_rms"][name] for grid in grids]
        panel.plot(
            [grid["shrink"] for grid in grids], values, "o", markersize=4, alpha=0.6, color=COLOURS[name], label=label
        )
    panel.set_xlabel("table cells per patch (above 1 the table is shrunk)", color=INK)
    panel.set_ylabel("embeddings off by, RMS (%)", color=INK)
    panel.set_title(
        f"Drift from timm's own result, {report['survey']['images']:,} held-out digits", color=INK, fontsize=10
    )
    panel.grid(True, color=INK, alpha=0.3, linewidth=0.6)
    panel.tick_params(colors=INK)
    panel.spines[["top", "right"]].set_visible(False)
    panel.spines[["left", "bottom"]].set_color(INK)
    panel.legend(frameon=False, labelcolor=INK, fontsize=9)
    figure.savefig(path, transparent=True)
