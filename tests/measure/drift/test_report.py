"""The drift report's words and files."""

import base64
import io
import json
import re
from dataclasses import fields, replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from PIL import Image

from tests.support.measured import batches, table_model
from tests.support.running import ran
from timm_naflex_fast.measure.contenders import CONTENDERS
from timm_naflex_fast.measure.drift.report import (
    FILES,
    TIES,
    headline,
    made_from,
    markdown,
    record,
    verdict,
    write,
)
from timm_naflex_fast.measure.drift.survey import Drift, Survey, survey

SAME = Drift(0, 0, 0, 0, 1, 1, 0.9)
EXACT = Drift(5e-7, 0.2, 6e-8, 1e-14, 1, 1, 0.9)
MOVED = Drift(1.5, 9, 0.12, 0.01, 0.75, 0.9, 0.85)
MADE = {
    "command": "naflex-fast drift <x> `y`",
    "commit": "c",
    "date": "2026-01-01",
    "machine": "m",
    "torch": "2",
    "timm": "1",
}


def one_survey(**drifts):
    return Survey(40, {"stock": SAME, **drifts}, [], {}, [])


def test_headline_answers_for_each_strategy():
    found = one_survey(grid_sample=MOVED, matmul=EXACT, **{"timm-flag-bilinear": MOVED})
    assert headline(found) == "Safe to switch to `matmul`: yes; `grid_sample`: no"
    assert headline(one_survey(matmul=MOVED)) == "Safe to switch to `matmul`: no"
    assert headline(one_survey()) == "No strategy of this package was measured"


def test_verdict_is_a_sentence_of_the_figures():
    found = one_survey(grid_sample=MOVED, matmul=EXACT, **{"timm-flag-bilinear": MOVED})
    assert verdict(found) == (
        "On 40 images, grid_sample moves the embeddings by 12.00 % (RMS), gives 25.00 % of the "
        "images another nearest neighbour and takes accuracy from 90.00 % to 85.00 %; matmul gives "
        "timm's own result but for rounding (embeddings within 5.0e-07)."
    )


@pytest.mark.parametrize(
    ("drift", "says"),
    [
        (replace(MOVED, neighbours=1, accuracy=None), "moves the embeddings by 12.00 % (RMS)."),
        (replace(MOVED, accuracy=None), "and gives 25.00 % of the images another nearest neighb"),
        (SAME, "gives timm's own result bit for bit."),
    ],
)
def test_verdict_leaves_out_what_did_not_change(drift, says):
    assert says in verdict(one_survey(matmul=drift))


def test_verdict_without_a_strategy_and_without_trained_weights():
    assert "nothing was compared" in verdict(one_survey())
    untrained = verdict(one_survey(matmul=EXACT), untrained=True)
    assert untrained.endswith("these weights are random, a trained model may differ.")


def test_which_code_made_the_figures():
    assert made_from({"commit": "release 1.0.0"}) == "release 1.0.0"
    assert made_from({"commit": "abc+"}) == "commit abc+"  # a report of before
    changed = {"commit": "abc", "code_last_changed_in": "def"}
    assert made_from(changed) == "commit abc (code last changed in def)"


@pytest.fixture(scope="module")
def measured():
    pytest.importorskip("matplotlib")
    with ran("interpolate_cached", "grid_sample", "matmul"):
        return survey(table_model(), list(batches(labels=True)), CONTENDERS, pictures=True)


@pytest.fixture
def written(measured, tmp_path):
    """The texts of a report's JSON, Markdown and HTML."""
    report = record(
        measured,
        model="tiny <vit>",
        weights="random & drawn",
        facts={"Images": "8 (noise)"},
        notes=["a *note*"],
        made=MADE,
        skipped=["a.png: <no>"],
    )
    files = write(report, measured, tmp_path)
    assert files == [tmp_path / name for name in FILES]
    return [file.read_text() for file in files]


def test_json_holds_all_figures(written):
    drift = json.loads(written[0])["survey"]["drift"]
    assert set(drift) == set(CONTENDERS)
    assert set(drift["matmul"]) == {field.name for field in fields(Drift)}


def test_markdown_says_what_the_page_says(written):
    text = written[1]
    assert text.startswith("# Safe to switch to `matmul`: yes; ")
    assert r"**Drift of tiny \<vit\>.**" in text and r"a \*note\*" in text
    assert TIES in text
    headings = re.findall(r"\n\n## (.*)\n\n", text)
    assert headings == [
        "Drift from timm's own result",
        "What was measured",
        "Not readable as images",
    ]


def test_page_says_what_was_measured(written):
    text = written[2]
    assert "<h1>Safe to switch to <code>matmul</code>: yes; " in text
    assert "own grid_sample setting, bicubic" in text
    for name in CONTENDERS:
        assert f"<code>{name}</code>" in text
    assert "<dd>8 (noise)</dd>" in text and "<dd>commit c, torch 2, timm 1, m</dd>" in text
    assert "timm&#39;s own too where timm&#39;s result itself cannot tell" in text
    assert text.count("Random weights") == 1
    assert "random" in re.search(r"<title>(.*?)</title>", text)[1]


def test_page_shows_what_users_named_as_text(written):
    text = written[2]
    assert "tiny &lt;vit&gt;" in text and "<vit>" not in text
    assert "a.png: &lt;no&gt;" in text


def test_page_is_whole_and_needs_nothing_from_outside(written, measured):
    text = written[2]
    assert text.count("<table>") == 1
    assert text.count("<img ") == 1 + len(measured.pictures) == 4
    assert "http" not in re.sub(r"data:[^\"]*", "", text)
    assert "url(" not in text
    assert "prefers-color-scheme: dark" in text


def test_each_address_holds_a_file_of_its_kind_without_a_background(written):
    images = re.findall(r'src(?:set)?="data:image/([\w+]+);base64,([^"]+)"', written[2])
    kinds = [kind for kind, _ in images]
    assert kinds == ["svg+xml"] * 2 + ["webp"] * 3

    svg = base64.b64decode(images[0][1]).decode()
    root = ElementTree.fromstring(svg[svg.index("<svg") :])
    words = " ".join(" ".join(root.itertext()).split())
    assert "table cells per patch" in words
    for name in CONTENDERS:
        assert (name in words) == (name != "stock")
    for _, data in images[2:]:
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert image.width > 300 and image.getpixel((0, 0))[3] == 0


@pytest.mark.parametrize("key", ["color", "marker", "markersize"])
def test_a_contender_looks_the_same_in_every_picture_and_like_no_other(key, measured):
    from timm_naflex_fast.measure.drift.plots import LOOKS, curves

    assert len({look[key] for look in LOOKS.values()}) == len(CONTENDERS)
    (line,) = curves(measured.grids, ["matmul"], 4.0).axes[0].lines
    assert getattr(line, f"get_{key}")() == LOOKS["matmul"][key]
    assert line.get_markerfacecolor() == "none"  # what lies below is seen


@pytest.mark.parametrize("width", [4.0, 9.0])
@pytest.mark.parametrize("blocks", [2, 12, 27])
def test_no_name_of_a_stage_lies_on_another(blocks, width):
    from timm_naflex_fast.measure.drift.plots import stages

    names = ["grid", "pixels", *(f"block_{number}" for number in range(blocks)), "pooled"]
    found = {"stages": [{"stage": name, "largest": 1e-6, "scale": 1} for name in names]}
    figure = stages({**found, "modes": {}}, width)
    figure.draw_without_rendering()
    words = figure.axes[0].get_xticklabels()
    assert {label.get_text() for label in words} <= set(names)
    assert len(words) >= len(names) / 2
    boxes = [label.get_window_extent() for label in words]
    assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))


def test_colours_end_at_the_largest_value(measured):
    from timm_naflex_fast.measure.drift.plots import scale

    largest = max(picture.maps["grid_sample"].max().item() for picture in measured.pictures)
    assert scale(measured.pictures) == largest > 0


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("www.a.b", r"www\.a.b"),
        ("http://a.b", r"http\://a.b"),
        ("@a", r"\@a"),
        ("$a$", r"\$a\$"),
        ("- a", r"\- a"),
        (" + a", r"\+ a"),
        ("1. a", r"1\. a"),
        ("23) a", r"23\) a"),
        ("# a", r"\# a"),
        ("> a", r"\> a"),
        ("a|b `c` *d* [e](f) <g>", r"a\|b \`c\` \*d\* \[e\](f) \<g\>"),
    ],
)
def test_what_users_name_is_no_markup(given, kept):
    assert markdown(given) == kept
