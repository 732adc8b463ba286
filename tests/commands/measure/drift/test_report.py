"""The drift report's words and files."""

import base64
import json
import re
from dataclasses import fields

import pytest

from tests.support.measured import batches, table_model
from tests.support.running import ran
from timm_naflex_fast.commands.measure.contenders import CONTENDERS
from timm_naflex_fast.commands.measure.drift.report import (
    FILES,
    Report,
    cells,
    headline,
    write,
)
from timm_naflex_fast.commands.measure.drift.survey import Drift, GridDrift, Survey, survey

SAME = Drift(0, 0, 0, 0, 1, 0.9)
EXACT = Drift(5e-7, 0.2, 6e-8, 1e-14, 1, 0.9)
MOVED = Drift(1.5, 9, 0.12, 0.01, 0.9, 0.85)
MADE = {
    "command": "naflex-fast drift <x> `y`",
    "commit": "c",
    "code_last_changed_in": "d",
    "date": "2026-01-01",
    "machine": "m",
    "torch": "2",
    "timm": "1",
}


SHRUNK = GridDrift((6, 6), 20, 2.0, {})
ENLARGED = GridDrift((20, 20), 20, 0.5, {})
OWN = GridDrift((12, 12), 20, 1.0, {}, resampled=False)


def one_survey(*grids, images=40, **drifts):
    return Survey(images, {"stock": SAME, **drifts}, list(grids))


def test_the_headline_says_for_each_strategy_on_how_many_images_and_by_which_number():
    found = one_survey(SHRUNK, grid_sample=MOVED, matmul=EXACT, interpolate_cached=SAME)
    assert headline(found) == (
        "Timm's result on 40 images: `matmul` (0.200 times what rounding explains), "
        "`interpolate_cached` (no difference). "
        "Another result on 40 images: `grid_sample` (9.00 times what rounding explains, RMS 12.00 %)"
    )


def test_the_headline_names_what_was_not_measured():
    found = one_survey(SHRUNK, **{"timm-flag-bilinear": MOVED})
    assert headline(found) == "No strategy of this package was measured"


def test_where_nothing_was_resampled_the_headline_gives_no_answer():
    found = one_survey(OWN, images=1, matmul=SAME, grid_sample=SAME)
    assert headline(found) == (
        "Not known from 1 image: `matmul`, `grid_sample` (every image has the table's own grid, so "
        "nothing was resampled)"
    )


def test_where_no_table_was_shrunk_grid_sample_gets_no_answer():
    found = one_survey(OWN, ENLARGED, matmul=EXACT, grid_sample=EXACT)
    assert headline(found) == (
        "Timm's result on 40 images: `matmul` (0.200 times what rounding explains). "
        "Not known from 40 images: `grid_sample` (no image has a grid smaller than the table, where "
        "it does not antialias)"
    )


@pytest.fixture(scope="module")
def measured():
    pytest.importorskip("matplotlib")
    with ran("interpolate_cached", "grid_sample", "matmul"):
        return survey(table_model(), list(batches(labels=True)), CONTENDERS)


@pytest.fixture
def written(measured, tmp_path):
    """The texts of a report's JSON and HTML."""
    report = Report(
        measured,
        model="tiny <vit>",
        weights="random & *drawn*",
        facts={"images": "8 (noise)"},
        made=MADE,
        skipped=["a.png: <no>"],
    )
    files = write(report, tmp_path)
    assert files == [tmp_path / name for name in FILES]
    return [file.read_text() for file in files]


def test_json_holds_all_figures(written):
    drift = json.loads(written[0])["survey"]["drift"]
    assert set(drift) == set(CONTENDERS)
    assert set(drift["matmul"]) == {field.name for field in fields(Drift)}


def test_the_page_holds_the_cells_of_the_terminal(written, measured):
    from markupsafe import escape

    _, page = written
    for name, drift in measured.drift.items():
        for heading, text in cells(name, drift).items():
            assert f'<td data-label="{heading}">{escape(text)}</td>' in page
    assert "contender" not in page and "a trained model may differ" in page


def test_what_users_named_is_text_and_no_markup(written):
    _, page = written
    assert "<h1>Timm&#39;s result on 8 images: <code>matmul</code> (" in page
    assert "tiny &lt;vit&gt;" in page and "<vit>" not in page
    assert "a.png: &lt;no&gt;" in page and "<dd>8 (noise)</dd>" in page
    assert "<dt>code last changed in</dt><dd>d</dd>" in page
    assert "random" in re.search(r"<title>(.*?)</title>", page)[1]


def test_page_needs_nothing_from_outside_and_each_address_holds_its_file(written, measured):
    page = written[1]
    assert "http" not in re.sub(r"data:[^\"]*", "", page) and "url(" not in page
    images = re.findall(r'src="data:image/([\w+]+);base64,([^"]+)"', page)
    # The curves of each mode but timm's own.
    assert [kind for kind, _ in images] == ["svg+xml"] * (len(CONTENDERS) - 1)
    assert "table cells per patch" in base64.b64decode(images[0][1]).decode()


def test_each_mode_has_a_plot_of_its_own_on_the_same_axes(measured):
    from timm_naflex_fast.commands.measure.drift.plots import curve_of_each

    figures = curve_of_each(measured.grids, CONTENDERS)
    assert [*figures] == [name for name in CONTENDERS if name != "stock"]
    limits = set()
    for name, figure in figures.items():
        (axes,) = figure.axes
        (line,) = axes.lines
        assert axes.get_title() == name and len(line.get_xdata()) == len(measured.grids)
        limits.add(axes.get_ylim())
    assert len(limits) == 1


def test_no_plot_is_wider_than_a_phone(measured):
    from timm_naflex_fast.commands.measure.drift.plots import curve_of_each, svg

    for figure in curve_of_each(measured.grids, CONTENDERS).values():
        drawn = base64.b64decode(svg(figure).split(",")[1]).decode()
        (points,) = re.findall(r'<svg [^>]*width="([\d.]+)pt"', drawn)
        assert float(points) * 96 / 72 < 368  # pixels: 400 without the page's margins
