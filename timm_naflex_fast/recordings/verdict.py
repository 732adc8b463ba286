"""What a comparison says: in cells of a table, in sentences, as JSON, and on a page.

Tests: tests/recordings/test_compare.py.
"""

import html
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from .compare import Comparison, Reason, Row, numbers_of
from .format import Array, Recording, Stages


def cells(row: Row) -> dict[str, str]:
    """One stage, as text under the table's headings."""
    limit = f"{row.limit:.1e}"
    parting = f"{len(row.parting)} of {row.compared}"
    if not np.isfinite(row.limit):
        limit = "none"
        parting = "not judged"
    return {
        "stage": row.stage,
        "largest difference": f"{row.largest:.2g}",
        "RMS difference": f"{row.rms:.2g}",
        "largest number": f"{row.scale:.3g}",
        "share": f"{row.share:.1e}",
        "limit": limit,
        "pictures beyond it": parting,
    }


def sentences(comparison: Comparison, reasons: Sequence[Reason]) -> list[str]:
    """Whether the port is right, on how many pictures, in which precision; and the reasons."""
    said = []
    precision = comparison.precision
    first = comparison.first()
    rows = {row.stage: row for row in comparison.rows()}
    if first is None:
        *_, last = rows.values()
        rounding = f"equal within {precision}'s rounding"
        if comparison.has_own_pixels:
            rounding = f"equal in {precision}, but for what its own pixels move"
        said.append(
            f"{rounding}, on {comparison.pictures} pictures: {last.stage} differs by "
            f"{last.share:.1e} of its largest number (limit {last.limit:.1e})"
        )
    else:
        said.append(
            f"parts at {first.stage}, in {len(first.parting)} of {first.compared} pictures: "
            f"{first.share:.1e} of the largest number (limit {first.limit:.1e}, {precision})"
        )
    for reason in reasons:
        at = "" if first is not None and reason.stage == first.stage else f" at {reason.stage}"
        kind = "the kind of difference"
        how_near = ""
        if reason.known:
            kind = "the likely reason"
            how_near = f" (that gives the port's numbers to {reason.error:.1e}, picture {reason.picture:03}; limit {reason.limit:.1e})"
        said.append(f"{kind}{at}: {reason.words}{how_near}")
    if comparison.has_own_pixels and first is None:
        said.append(
            "the port read the pictures itself, and another resizer rounds other pixels; begin with "
            "the reference's pixels for a stricter answer"
        )
    if comparison.missing:
        said.append(f"not written by the port, so not compared: {', '.join(comparison.missing)}")
    rows_of_some = [row for row in rows.values() if row.compared < comparison.total]
    if rows_of_some:
        counts = [f"{row.stage} {row.compared} of {comparison.total}" for row in rows_of_some]
        said.append(f"of some stages not all pictures were compared: {', '.join(counts)}")
    return said


def as_json(comparison: Comparison, reasons: Sequence[Reason]) -> dict[str, Any]:
    """The comparison as one JSON object."""
    first = comparison.first()
    return {
        "pictures": comparison.pictures,
        "precision": comparison.precision,
        "first": None if first is None else first.stage,
        "reasons": [asdict(reason) for reason in reasons],
        "not_compared": comparison.missing,
        "stages": [asdict(row) for row in comparison.rows()],
        "verdict": sentences(comparison, reasons),
    }


STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --page: #fff; --faint: #d1d9e0; --card: #f6f8fa; --soft: #59636e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --page: #0d1117; --faint: #30363d; --card: #151b23; --soft: #9198a1; }
}
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: clamp(1.2rem, 4vw, 1.6rem); line-height: 1.25; } h2 { font-size: 1.1rem; }
.card { padding: .75rem 1rem; border-radius: .5rem; background: var(--card); border: 1px solid var(--faint); }
.wide { overflow-x: auto; } .soft { color: var(--soft); font-size: .85rem; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--faint); text-align: right; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } .parts td { font-weight: 600; }
svg { width: 100%; max-width: 30rem; max-height: 30rem; }
.legend { width: 10rem; height: .7rem; border: 1px solid var(--soft); display: inline-block;
  background: linear-gradient(to right, transparent, #d1422f); }
@media (max-width: 48rem) {
  thead { display: none; } tr { display: block; padding: .5rem 0; border-bottom: 2px solid var(--faint); }
  td { display: flex; justify-content: space-between; border: 0; padding: .1rem 0; }
  td::before { content: attr(data-heading); color: var(--soft); font-weight: 400; }
}
"""


def page(
    comparison: Comparison,
    reasons: Sequence[Reason],
    reference: Recording,
    ports: Sequence[Stages],
    title: str,
) -> str:
    """The comparison as one HTML page, with a map of the first stage that parts."""
    rows = comparison.rows()
    head = "".join(f"<th>{heading}</th>" for heading in cells(rows[0]))
    lines = []
    for row in rows:
        kind = ' class="parts"' if row.parting else ""
        texts = []
        for heading, text in cells(row).items():
            # On a narrow screen each cell is a line, under the heading that it carries.
            texts.append(f'<td data-heading="{heading}">{html.escape(text)}</td>')
        lines.append(f"<tr{kind}>{''.join(texts)}</tr>")
    said = [html.escape(text) for text in sentences(comparison, reasons)]
    paragraphs = "".join(f"<p>{text}.</p>" for text in said)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
<div class="card">{paragraphs}</div>
<h2>Stage by stage</h2>
<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>
<p class="soft">A share is that of the stage's largest number in the reference. For pixels, which go from
-1 to 1, it is a share of 1. The limit is the largest share that counts as rounding.</p>
{_where(comparison, reference, ports)}
</body></html>
"""


def _where(comparison: Comparison, reference: Recording, ports: Sequence[Stages]) -> str:
    """A map of the first stage that parts, over the grid of the first picture that does."""
    first = comparison.first()
    if first is None:
        return ""
    picture, *_ = first.parting
    ours, theirs = numbers_of(first.stage, ports[picture], reference.stages[picture])
    grid = reference.stages[picture]["grid"]
    if ours.ndim != 2 or ours.shape != theirs.shape:
        return ""
    largest = np.abs(ours - theirs).max(1).reshape(tuple(map(int, grid)))  # (h, w)
    name = html.escape(str(reference.about["pictures"][picture].get("name", "")))
    return f"""<h2>Where in the picture</h2>
<p class="soft">Picture {picture:03} {name}: the largest difference of each of {grid[0]} x {grid[1]} tokens at
{first.stage}.</p>
<p class="soft">0 <span class="legend"></span> {largest.max():.2g}</p>
{_map(largest)}"""


def _map(values: Array) -> str:
    """Numbers (h, w) as a picture of squares, the largest one full."""
    h, w = values.shape
    shares = values / (values.max() or 1.0)
    squares = []
    for (y, x), share in np.ndenumerate(shares):
        squares.append(
            f'<rect x="{x}" y="{y}" width="1" height="1" fill="#d1422f" fill-opacity="{share:.2f}">'
            f"<title>row {y}, column {x}: {values[y, x]:.2g}</title></rect>"
        )
    frame = f'<rect width="{w}" height="{h}" fill="none" stroke="#7d8590" stroke-width="0.05"/>'
    y, x = np.unravel_index(values.argmax(), values.shape)
    label = f"{h} rows by {w} columns; the largest difference is at row {y}, column {x}"
    return (
        f'<svg viewBox="-0.1 -0.1 {w + 0.2} {h + 0.2}" role="img" aria-label="{label}">'
        f"{''.join(squares)}{frame}</svg>"
    )
