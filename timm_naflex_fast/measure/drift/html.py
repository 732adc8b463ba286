"""The report as one HTML page: nothing is fetched, and the page follows the reader's light or dark."""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path

from .data import COLUMNS, Report, cells, facts, groups
from .plots import plots, style

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --page: #ffffff; --faint: #d1d9e0; --card: #f6f8fa; --soft: #59636e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --page: #0d1117; --faint: #30363d; --card: #151b23; --soft: #9198a1; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: clamp(1.05rem, 4vw, 1.5rem); line-height: 1.25; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: .95rem; margin: 0; }
.verdict, .stand-in { padding: .75rem 1rem; border-radius: .5rem; background: var(--card);
  border: 1px solid var(--faint); }
.verdict { font-size: 1.1rem; } .stand-in { border-color: #c9880a; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1rem 1rem; font-size: .85rem; }
dt { color: var(--soft); } dd { margin: 0; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .5rem; border-bottom: 1px solid var(--faint); text-align: right; vertical-align: top; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
tbody th { font-family: ui-monospace, monospace; font-weight: 600; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; padding: 0; font-size: .85rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; } .plots svg { display: block; width: 100%; max-width: 34rem; height: auto; }
figcaption, .note { font-size: .8rem; color: var(--soft); }
.maps { margin: .75rem 0 1.25rem; } .row { display: flex; flex-wrap: wrap; gap: .5rem 1rem; align-items: flex-start; }
.row div { font-size: .75rem; width: 10rem; } .row img { display: block; max-width: 100%; }
.row img.map { image-rendering: pixelated; }
.bar { height: .8rem; max-width: 20rem; border-radius: .2rem; }
.ends { display: flex; justify-content: space-between; max-width: 20rem; font-size: .75rem; }
@media (max-width: 52rem) {
  dl { grid-template-columns: minmax(0, 1fr); } dd { margin: 0 0 .4rem; }
  thead { display: none; } tbody tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--faint); }
  tbody th, tbody td { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: .1rem 0; }
  tbody td:nth-child(n) { text-align: right; }
  td::before { content: attr(data-label); color: var(--soft); text-align: left; flex: none; }
}
"""
COLOURS = "viridis"
LONG_SIDE = 150  # CSS pixels of a picture


def write_html(path: str | Path, report: Report) -> None:
    """Write the whole page.

    Raises:
        RuntimeError: matplotlib, which draws the plots, is not installed.
    """
    Path(path).write_text(render(report), encoding="utf-8")


def render(report: Report) -> str:
    """The whole page's text."""
    weights = f"Weights: {escape(report.weights)}."
    title = f"Drift of {escape(report.model)}, weights: {escape(report.weights)}"
    parts = [
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>Drift of {escape(report.model)}</h1>",
    ]
    if report.stand_in:
        parts.append(
            f'<p class="stand-in"><strong>Stand-in weights</strong> ({escape(report.weights)}): the figures show how '
            "the ways of resampling differ on these shapes, and say nothing about a trained model.</p>"
        )
    parts += [f'<p class="verdict">{escape(report.verdict)}</p>', _facts(report)]
    parts += [f"<h2>Drift from {escape(report.survey.baseline)}</h2>", _table(report), f'<p class="note">{weights}']
    parts += [f"Not measured: {escape(name)}, {escape(why)}." for name, why in report.survey.left_out.items()]
    parts += ["</p>\n<h2>Where it comes from</h2>", _legend(report), '<div class="plots">']
    parts += [
        f"<figure>\n<h3>{escape(name)}</h3>\n{svg}\n"
        f"<figcaption>{escape(CAPTIONS[name])} {weights}</figcaption>\n</figure>"
        for name, svg in plots(report).items()
    ]
    parts.append("</div>")
    if report.survey.pictures:
        parts += ["<h2>Where on the image</h2>", _maps(report, weights)]
    if report.skipped:
        lines = "".join(f"<li>{escape(line)}</li>" for line in report.skipped)
        parts.append(f"<h2>Not readable as images</h2>\n<ul>{lines}</ul>")
    return "\n".join([*parts, "</body>\n</html>\n"])


CAPTIONS = {
    "Drift after each block": "Root mean square of the difference of the patch tokens over that of the baseline's.",
    "Drift against aspect ratio": "Of the embeddings; a mark per patch grid.",
    "Drift against downsampling": "Of the embeddings; a mark per patch grid. Table cells per patch along the axis "
    "where there are more of them: above 1 the table is shrunk, and antialiasing counts.",
    "Drift of the pooled output": "On a logarithmic axis; no bar is no drift at all.",
}


def _facts(report: Report) -> str:
    return f"<dl>{''.join(f'<dt>{escape(a)}</dt><dd>{escape(b)}</dd>' for a, b in facts(report))}</dl>"


def _table(report: Report) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in COLUMNS)
    rows = []
    for name in report.survey.drift:
        first, *rest = cells(report, name)
        tds = (f'<td data-label="{escape(label)}">{escape(cell)}</td>' for label, cell in zip(COLUMNS[1:], rest))
        rows.append(f'<tr><th scope="row">{escape(first)}</th>{"".join(tds)}</tr>')
    body = "\n".join(rows)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _legend(report: Report) -> str:
    """A sign per group of contenders whose drift is the same; the first group has none but rounding."""
    lines = []
    for place, group in enumerate(groups(report.survey)):
        colour, _, sign = style(place)
        if group:
            words = escape(" = ".join(group)) + (" (nothing but rounding)" if place == 0 else "")
            lines.append(f'<li><span style="color:{colour}">{sign}</span> {words}</li>')
    return f'<ul class="legend">{"".join(lines)}</ul>'


def _maps(report: Report, weights: str) -> str:
    pictures = report.survey.pictures
    top = max(value for one in pictures for rows in one.maps.values() for row in rows for value in row)
    parts = [
        "<p>Length of a token's difference, over the root mean square length of the baseline's tokens; "
        "one colour scale for all.</p>",
        f'<div class="bar" style="background:linear-gradient(to right,{",".join(_colours(8))})"></div>',
        f'<div class="ends"><span>0</span><span>{top:.3g}</span></div>',
    ]
    for one in pictures:
        h, w = one.grid
        size = f'width="{round(LONG_SIDE * w / max(h, w))}" height="{round(LONG_SIDE * h / max(h, w))}"'
        name = escape(one.name)
        panels = [f'<div><img {size} alt="{name}" src="data:image/jpeg;base64,{one.jpeg}">{name}</div>']
        for contender, rows in one.maps.items():
            peak = max(map(max, rows))
            data = _png(rows, top)
            alt = f"drift of {contender} over the patches of {one.name}, at most {peak:.2g}"
            panels.append(
                f'<div><img class="map" {size} alt="{escape(alt)}" src="data:image/png;base64,{data}">'
                f"{escape(contender)}, at most {peak:.2g}</div>"
            )
        caption = f"{name}, {h}x{w} patches, as the model sees it, and the drift per patch. {weights}"
        row = f'<div class="row">{"".join(panels)}</div>'
        parts.append(f'<figure class="maps">\n{row}\n<figcaption>{caption}</figcaption>\n</figure>')
    return "\n".join(parts)


def _colours(count: int) -> list[str]:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps[COLOURS](i / (count - 1))) for i in range(count)]


def _png(rows: list[list[float]], top: float) -> str:
    """A pixel per patch, in the colours of 0 to ``top``, as base64 text."""
    import numpy as np
    from matplotlib import colormaps
    from PIL import Image

    values = np.asarray(rows) / top if top else np.zeros_like(np.asarray(rows))
    file = io.BytesIO()
    Image.fromarray(colormaps[COLOURS](values, bytes=True)[..., :3]).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode("ascii")
