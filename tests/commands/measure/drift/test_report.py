"""The drift report's words and files."""

import re

import pytest

from tests.support.measured import batches, table_model
from tests.support.running import ran
from timm_naflex_fast.commands.measure.drift.report import headline, rows, write
from timm_naflex_fast.commands.measure.drift.survey import survey

EXACT = {"embed_rel_rms": 6e-8, "embed_roundings": 0.2}
MOVED = {"embed_rel_rms": 0.12, "embed_roundings": 9}
SHRUNK = {"shrink": 2.0, "resampled": True}
ENLARGED = {"shrink": 0.5, "resampled": True}
OWN = {"shrink": 1.0, "resampled": False}
# Grids, figures, and the answers.
HEADLINES = [
    (
        [SHRUNK],
        dict(grid_sample=MOVED, matmul=EXACT),
        "`matmul` ✓ but for rounding; `grid_sample` ✗ no (tokens off by 12.00 %, RMS)",
    ),
    (
        [OWN],
        dict(matmul=EXACT),
        "`matmul` no answer (every image has the table's own grid, so nothing was resampled)",
    ),
    (
        [OWN, ENLARGED],
        dict(matmul=EXACT, grid_sample=EXACT),
        "`matmul` ✓ but for rounding; `grid_sample` no answer (no image has a grid smaller than the table, where it "
        "does not antialias)",
    ),
]


@pytest.mark.parametrize(("grids", "figures", "says"), HEADLINES)
def test_the_headline_says_on_how_many_images_and_gives_no_answer_that_they_do_not(
    grids, figures, says
):
    found = {"images": 4000, "drift": {"stock": EXACT, **figures}, "grids": grids}
    assert headline(found) == f"Timm's result on 4,000 images? {says}"


@pytest.fixture(scope="module")
def measured():
    pytest.importorskip("jinja2")
    with ran("interpolate_cached", "grid_sample", "matmul"):
        return survey(table_model(), list(batches(labels=True)))


@pytest.fixture(scope="module")
def written(measured, tmp_path_factory):
    """The text of a report's page."""
    record = {
        "survey": measured,
        "headline": headline(measured),
        "model": "tiny <vit>",
        "weights": "random & *drawn*",
        "source": "8 (noise)",
        "made": {"command": "naflex-fast drift <x> `y`", "commit": "d"},
        "skipped": ["a.png: <no>"],
    }
    folder = tmp_path_factory.mktemp("report")
    write(record, folder)
    assert (folder / "report.json").exists()
    return (folder / "report.html").read_text()


def test_the_page_holds_the_cells_of_the_terminal(written, measured):
    from markupsafe import escape

    page = written
    for line in rows(measured):
        assert {"same nearest image", "same class", "accuracy"} < set(line)
        for heading, text in line.items():
            colour = {"✓": ' class="good"', "✗": ' class="bad"'}.get(text[0], "")
            assert f'<td data-label="{escape(heading)}"{colour}>{escape(text)}</td>' in page
    assert "contender" not in page and "a trained model may differ" in page


def test_what_users_named_is_text_and_no_markup_and_the_title_fits_on_a_phone(written):
    page = written
    assert (
        "Timm&#39;s result on 8 images? <code>matmul</code> ✓ but for rounding; <code>interpolate_cached</code> ✓ but for "
        "rounding; <code>grid_sample</code> ✗ no" in page
    )
    assert "tiny &lt;vit&gt;" in page and "<vit>" not in page
    assert "a.png: &lt;no&gt;" in page and "<dd>8 (noise)</dd>" in page
    assert "<dt>commit</dt><dd>d</dd>" in page
    assert "random" in re.search(r"<title>(.*?)</title>", page)[1]
    (title,) = re.findall(r"<h1>(.*?)</h1>", page)
    assert len(title) < 30


def test_the_page_needs_nothing_from_outside_and_its_picture_shows_who_is_off(written):
    page = written
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "") and "url(" not in page
    found = re.findall(r'width: ([\d.]+)%"></i></div>\s*<b class="(\w+)">(.) ', page)
    assert [(sign, mark) for _, sign, mark in found] == [("good", "✓")] * 2 + [("bad", "✗")]
    lengths = [float(length) for length, *_ in found]
    assert lengths[:2] == [0, 0] and max(lengths) == 100 and min(lengths[2:]) > 1


def test_the_panel_has_a_dot_for_each_grid_inside_of_it(written, measured):
    panels = re.findall(r'<g aria-label="[^"]*, ([^"]*)">(.*?)</g>', written, re.S)
    ((mode, panel),) = panels
    assert mode == "grid_sample"
    dots = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', panel)
    assert len(dots) == len(measured["grids"])
    assert all(50 < float(x) <= 338 and 30 <= float(y) < 190 for x, y in dots)
