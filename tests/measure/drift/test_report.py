"""The drift report's words, files and command."""

import base64
import io
import json
import re
from dataclasses import fields, replace
from xml.etree import ElementTree

import pytest
from PIL import Image

from tests.support.measured import batches, table_model
from tests.support.running import ran
from timm_naflex_fast.measure.contenders import CONTENDERS
from timm_naflex_fast.measure.drift.report import FILES, headline, markdown, record, verdict, write
from timm_naflex_fast.measure.drift.survey import Drift, Survey, survey

SAME, EXACT = Drift(0, 0, 0, 0, 1, 1, 0.9), Drift(5e-7, 0.2, 6e-8, 1e-14, 1, 1, 0.9)
MOVED = Drift(1.5, 9, 0.12, 0.01, 0.75, 0.9, 0.85)


def one_survey(**drifts):
    return Survey(40, {"stock": SAME, **drifts}, [], {}, [])


def test_headline_and_verdict_are_a_sentence_each_from_the_figures():
    found = one_survey(grid_sample=MOVED, matmul=EXACT, **{"timm-flag-bilinear": MOVED})
    assert headline(found) == "Safe to switch to `matmul`: yes; `grid_sample`: no"
    assert headline(one_survey(matmul=MOVED)) == "Safe to switch to `matmul`: no"
    assert headline(one_survey()) == "No strategy of this package was measured"
    assert verdict(found) == (
        "On 40 images, grid_sample moves the embeddings by 12.00 % (RMS), gives 25.00 % of the images another nearest "
        "neighbour and takes accuracy from 90.00 % to 85.00 %; matmul gives timm's own result but for rounding "
        "(embeddings within 5.0e-07)."
    )
    same = replace(MOVED, neighbours=1, accuracy=None)
    assert "0 %" not in verdict(one_survey(matmul=same)).replace("12.00 %", "")
    assert "matmul moves the embeddings by 12.00 % (RMS)." in verdict(one_survey(matmul=same))
    untrained = verdict(one_survey(matmul=EXACT), untrained=True)
    assert untrained.endswith("these weights are random, a trained model may differ.")
    assert "bit for bit" in verdict(one_survey(interpolate_cached=SAME))
    assert "nothing was compared" in verdict(one_survey())


@ran("interpolate_cached", "grid_sample", "matmul")
def test_page_is_whole_and_needs_nothing_from_outside(tmp_path):
    pytest.importorskip("matplotlib")
    from timm_naflex_fast.measure.drift.plots import LOOKS, curves, scale

    found = survey(table_model(), list(batches(labels=True)), CONTENDERS, pictures=True)
    made = dict(
        command="naflex-fast drift <x> `y`",
        commit="c",
        date="2026-01-01",
        machine="m",
        torch="2",
        timm="1",
    )
    about = dict(
        model="tiny <vit>",
        weights="random & drawn",
        facts={"Images": "8 (noise)"},
        notes=["a *note*"],
    )
    report = record(found, **about, made=made, skipped=["a.png: <no>"])
    assert write(report, found, tmp_path) == [tmp_path / name for name in FILES]
    text = (tmp_path / "report.html").read_text()
    assert text.count("<table>") == 1 and text.count("<img ") == 1 + len(found.pictures) == 4
    assert "http" not in re.sub(r"data:[^\"]*", "", text) and "url(" not in text
    assert "prefers-color-scheme: dark" in text
    assert "tiny &lt;vit&gt;" in text and "<vit>" not in text and "a.png: &lt;no&gt;" in text
    assert (
        text.count("Random weights") == 1
        and "random" in re.search(r"<title>(.*?)</title>", text)[1]
    )
    assert "<h1>Safe to switch to <code>matmul</code>: yes; " in text
    assert all(f"<code>{name}</code>" in text for name in found.drift)
    drift = json.loads((tmp_path / "report.json").read_text())["survey"]["drift"]
    assert set(drift) == set(CONTENDERS) and set(drift["matmul"]) == {
        field.name for field in fields(Drift)
    }
    assert "own grid_sample setting, bicubic" in text and "<dd>8 (noise)</dd>" in text
    # Each address holds a file of the kind that it names, drawn without a background.
    images = re.findall(r'src(?:set)?="data:image/([\w+]+);base64,([^"]+)"', text)
    assert [kind for kind, _ in images] == ["svg+xml"] * 2 + ["webp"] * 6
    svg = base64.b64decode(images[0][1]).decode()
    root = ElementTree.fromstring(svg[svg.index("<svg") :])
    words = " ".join(" ".join(root.itertext()).split())
    assert (
        "table cells per patch" in words and "timm-flag-bicubic" in words and "stock" not in words
    )
    assert all(name in words for name in CONTENDERS if name != "stock")
    for key in ("color", "marker"):  # the same in every picture
        assert len({look[key] for look in LOOKS.values()}) == len(CONTENDERS)
        (line,) = curves(found.grids, ["matmul"], 4.0).axes[0].lines
        assert getattr(line, f"get_{key}")() == LOOKS["matmul"][key]
    for _, data in images[2:]:
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert image.width > 300 and image.getpixel((0, 0))[3] == 0
    grid_sample = max(one.maps["grid_sample"].max().item() for one in found.pictures)
    assert scale(found.pictures) == grid_sample > 0


def test_what_users_name_is_no_markup():
    given = ["www.a.b", "http://a.b", "@a", "$a$", "- a", " + a", "1. a", "23) a", "# a", "> a"]
    kept = [
        "www\\.a.b",
        "http\\://a.b",
        "\\@a",
        "\\$a\\$",
        "\\- a",
        "\\+ a",
        "1\\. a",
        "23\\) a",
        "\\# a",
        "\\> a",
    ]
    assert list(map(markdown, given)) == kept
    assert markdown("a|b `c` *d* [e](f) <g>") == r"a\|b \`c\` \*d\* \[e\](f) \<g\>"
