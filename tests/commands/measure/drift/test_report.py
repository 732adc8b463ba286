"""The drift report's words and files."""

import base64
import re

import pytest

from tests.support.measured import batches, table_model
from tests.support.running import ran
from timm_naflex_fast.commands.measure.contenders import CONTENDERS
from timm_naflex_fast.commands.measure.drift.plots import curves
from timm_naflex_fast.commands.measure.drift.report import headline, rows, write
from timm_naflex_fast.commands.measure.drift.survey import survey

EXACT = {"embed_rel_rms": 6e-8, "embed_roundings": 0.2}
MOVED = {"embed_rel_rms": 0.12, "embed_roundings": 9}
SHRUNK = {"shrink": 2.0, "resampled": True}
ENLARGED = {"shrink": 0.5, "resampled": True}
OWN = {"shrink": 1.0, "resampled": False}
MOVES = ["grid_sample", "timm-flag-bilinear", "timm-flag-bicubic"]
# Grids, figures, and the answer behind the number of images.
HEADLINES = [
    (
        [SHRUNK],
        dict(grid_sample=MOVED, matmul=EXACT),
        "; equal to timm but for rounding: `matmul`; not equal: `grid_sample` (tokens off by 12.00 %, RMS)",
    ),
    ([SHRUNK], {"timm-flag-bilinear": MOVED}, ""),
    (
        [OWN],
        dict(matmul=EXACT),
        "; no answer: `matmul` (every image has the table's own grid, so nothing was resampled)",
    ),
    (
        [OWN, ENLARGED],
        dict(matmul=EXACT, grid_sample=EXACT),
        "; equal to timm but for rounding: `matmul`; no answer: `grid_sample` (no image has a grid smaller than the "
        "table, where it does not antialias)",
    ),
]


@pytest.mark.parametrize(("grids", "figures", "says"), HEADLINES)
def test_the_headline_says_on_how_many_images_and_gives_no_answer_that_they_do_not(
    grids, figures, says
):
    found = {"images": 4000, "drift": {"stock": EXACT, **figures}, "grids": grids}
    assert headline(found) == f"4,000 images{says}"


@pytest.fixture(scope="module")
def measured():
    pytest.importorskip("matplotlib")
    with ran("interpolate_cached", "grid_sample", "matmul"):
        return survey(table_model(), list(batches(labels=True)), CONTENDERS)


@pytest.fixture(scope="module")
def written(measured, tmp_path_factory):
    """The text of a report's page."""
    record = {
        "survey": measured,
        "headline": headline(measured),
        "model": "tiny <vit>",
        "weights": "random & *drawn*",
        "source": "8 (noise)",
        "made": {"command": "naflex-fast drift <x> `y`", "code_last_changed_in": "d"},
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
            assert f'<td data-label="{heading}">{escape(text)}</td>' in page
    assert "contender" not in page and "a trained model may differ" in page


def test_what_users_named_is_text_and_no_markup_and_the_title_fits_on_a_phone(written):
    page = written
    assert (
        "8 images; equal to timm but for rounding: <code>matmul</code>, <code>interpolate_cached</code>; not equal: "
        in page
    )
    assert "tiny &lt;vit&gt;" in page and "<vit>" not in page
    assert "a.png: &lt;no&gt;" in page and "<dd>8 (noise)</dd>" in page
    assert "<dt>code last changed in</dt><dd>d</dd>" in page
    assert "random" in re.search(r"<title>(.*?)</title>", page)[1]
    (title,) = re.findall(r"<h1>(.*?)</h1>", page)
    assert len(title) < 30


def test_page_needs_nothing_from_outside_and_each_address_holds_a_plot_of_a_difference(written):
    page = written
    assert "http" not in re.sub(r"data:[^\"]*", "", page) and "url(" not in page
    images = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)" alt="[^"]*, (.*)"', page)
    assert [mode for _, mode in images] == MOVES
    for content, mode in images:
        drawn = base64.b64decode(content).decode()
        assert "table cells per patch" in drawn and mode in drawn
        # As wide as a phone without the page's margins.
        (points,) = re.findall(r'<svg [^>]*width="([\d.]+)pt"', drawn)
        assert float(points) * 96 / 72 < 368  # pixels


def test_plots_of_all_modes_have_the_same_axes_and_room_above_every_dot(measured):
    limits = set()
    for name in MOVES:
        (axes,) = curves(measured["grids"], [name]).axes
        (line,) = axes.lines
        assert axes.get_title() == name and len(line.get_xdata()) == len(measured["grids"])
        limits.add(axes.get_ylim())
    ((low, high),) = limits
    assert low == 0 and max(line.get_ydata()) < 0.9 * high
