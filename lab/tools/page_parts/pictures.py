"""The pictures of the pages that show results: how far modes move a model."""

from lab.tools.page_parts.results import OURS, RESULTS, read_one
from timm_naflex_fast.commands.measure.drift.report import render


def draw_drift() -> None:
    """Draw the pictures of drift, on the digits and on photos."""
    names = ("grid_sample", OURS)
    for folder in ("digits", "photos"):
        report = read_one(f"drift/{folder}/report")
        picture = render("dots.svg.j2", grids=report["survey"]["grids"], names=names)
        (RESULTS / "drift" / folder / "drift.svg").write_text(picture)
