"""The drift report's words, files and command."""

import base64
import html
import io
import json
import re
import sys
from dataclasses import fields
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from tests.support.measured import WITHOUT_HF, batches, table_model
from tests.support.oracles import row_major, vit_batch
from tests.support.running import ran
from timm_naflex_fast.cli import main as cli
from timm_naflex_fast.measure.contenders import NAMES
from timm_naflex_fast.measure.drift.plots import scale
from timm_naflex_fast.measure.drift.report import FILES, Report, headline, verdict, write
from timm_naflex_fast.measure.drift.survey import Drift, Survey, survey
from timm_naflex_fast.measure.models import load_model


def one_survey(**drifts):
    drift = {"stock": Drift(0, 0, 0, 0, 1, 1, 0.9), **drifts}
    return Survey(40, drift, [], {}, [])


def test_verdict_is_one_sentence_from_the_figures():
    exact, moved = Drift(5e-7, 0.2, 6e-8, 1e-14, 1, 1, 0.9), Drift(1.5, 9, 0.12, 0.01, 0.75, 0.9, 0.85)
    text = verdict(one_survey(matmul=exact, grid_sample=moved, **{"hf-siglip2": Drift(0.5, 9, 0.04, 0.01, 1, 1, 0.9)}))
    assert text == (
        "On 40 images, grid_sample moves the embeddings by 12.00 % (RMS), gives 25.00 % of the images another nearest "
        "neighbour and takes accuracy from 90.00 % to 85.00 %; matmul gives timm's own result but for rounding "
        "(embeddings within 5.0e-07)."
    )
    assert verdict(one_survey(matmul=exact), untrained=True).endswith(
        "these weights are random, a trained model may differ."
    )
    assert "bit for bit" in verdict(one_survey(interpolate_cached=Drift(0, 0, 0, 0, 1, 1, 0.9)))
    assert "nothing was compared" in verdict(one_survey())


def test_headline_answers_first():
    exact, moved = Drift(5e-7, 0.2, 6e-8, 1e-14, 1, 1, 0.9), Drift(1.5, 9, 0.12, 0.01, 0.75, 0.9, 0.85)
    text = headline(one_survey(grid_sample=moved, matmul=exact, **{"hf-siglip2": moved}))
    assert text == "Safe to switch to `matmul`: yes; `grid_sample`: no"
    assert headline(one_survey(matmul=moved)) == "Safe to switch to `matmul`: no"
    assert headline(one_survey()) == "No strategy of this package was measured"


# the files


class Page(HTMLParser):
    """Counts what a page holds and checks that what opens is closed."""

    EMPTY = ("meta", "img", "source")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.outside, self.ids = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href") and not value.startswith(("data:", "#")):
                self.outside.append(value)
            if name == "id":
                self.ids.append(value)
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def report():
    pytest.importorskip("matplotlib")
    found = survey(table_model(), list(batches(labels=True)), WITHOUT_HF, pictures=True)
    made = dict(command="naflex-fast drift <x> `y`", commit="c", date="2026-01-01", machine="m", torch="2", timm="1")
    return Report("tiny <vit>", "random & drawn", {"Images": "8 (noise)"}, ["a *note*"], made, ["a.png: <no>"], found)


@pytest.fixture(scope="module")
def written(report, tmp_path_factory):
    """The text of each file of the report."""
    folder = tmp_path_factory.mktemp("report")
    assert write(report, folder) == [folder / name for name in FILES]
    return {name: (folder / name).read_text() for name in FILES}


def test_page_is_whole_and_needs_nothing_from_outside(report, written):
    text = written["report.html"]
    page = Page(text)
    assert page.tags.count("table") == 1 and page.tags.count("img") == 1 + len(report.survey.pictures) == 4
    assert page.outside == [] and "http" not in re.sub(r"data:[^\"]*", "", text) and "url(" not in text
    assert "prefers-color-scheme: dark" in text
    assert "tiny &lt;vit&gt;" in text and "<vit>" not in text and "a.png: &lt;no&gt;" in text
    assert text.count("Random weights") == 1 and "random" in re.search(r"<title>(.*?)</title>", text)[1]
    assert "<h1>Safe to switch to <code>matmul</code>: yes; " in text
    for name in report.survey.drift:
        assert f"<code>{name}</code>" in text
    assert "the proposal in timm issue 2514" in text and "<dd>8 (noise)</dd>" in text


def test_plots_are_pictures_that_open(report, written):
    """Each address holds a file of the kind that it names, drawn without a background."""
    found = re.findall(r'src(?:set)?="data:image/([\w+]+);base64,([^"]+)"', written["report.html"])
    assert [kind for kind, _ in found] == ["svg+xml"] * 2 + ["webp"] * 3
    svg = base64.b64decode(found[0][1]).decode()
    root = ElementTree.fromstring(svg[svg.index("<svg") :])
    words = " ".join(" ".join(root.itertext()).split())
    assert "table cells per patch" in words and "issue-2514-zeros" in words and "stock" not in words
    assert "interpolate_cached, matmul" in words and "grid_sample, timm-flag-bilinear" in words  # on each other
    for _, data in found[2:]:
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert image.width > 300 and image.getpixel((0, 0))[3] == 0
    grid_sample = max(one.maps["grid_sample"].max().item() for one in report.survey.pictures)
    assert scale(report.survey.pictures) == grid_sample > 0


@pytest.mark.parametrize("name", ["digits", "photos"])
def test_committed_reports_are_small_and_name_their_weights(name):
    folder = Path(__file__).resolve().parents[3] / "results" / "drift" / name
    found = json.loads((folder / "report.json").read_text())
    text = (folder / "report.html").read_text()
    page = Page(text)
    for said in (text, (folder / "report.md").read_text().replace("\\", "")):
        assert found["verdict"] in html.unescape(said) and found["weights"] in html.unescape(said)
    assert page.outside == [] and f"<dd>{found['weights']}</dd>" in html.unescape(text)
    assert found["weights"].startswith("random") == (name == "photos") == ("Random weights" in text)
    for exact in ("interpolate_cached", "matmul"):
        assert found["survey"]["drift"][exact]["embed_roundings"] <= 1
    assert sum(path.stat().st_size for path in folder.iterdir()) < 250_000  # the maps of the photos are most of it


def test_json_schema(written):
    record = json.loads(written["report.json"])
    assert set(record) == {"model", "weights", "facts", "notes", "made", "skipped", "survey", "headline", "verdict"}
    found = record["survey"]
    assert set(found) == {"images", "drift", "grids", "left_out"}
    assert set(found["drift"]) == set(found["grids"][0]["embed_rel_rms"]) == set(WITHOUT_HF)
    for drift in found["drift"].values():
        assert set(drift) == {field.name for field in fields(Drift)}


def test_without_matplotlib_it_says_so_before_measuring(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("timm_naflex_fast.cli.drift.load_model", None)
    assert cli.main(["drift", "--model", "naflexvit_base_patch16_gap", "--out", str(tmp_path)]) == 2
    assert "needs matplotlib: pip install matplotlib" in capsys.readouterr().err


# the inputs and the command


@pytest.fixture
def folder(tmp_path):
    images = tmp_path / "images"
    images.mkdir()
    for i, size in enumerate(((20, 60, 3), (60, 20, 3), (40, 40, 3))):
        Image.fromarray(np.random.default_rng(i).integers(0, 255, size, np.uint8)).save(images / f"{i}.png")
    return images


@pytest.fixture
def small_timm(monkeypatch):
    """timm's models, one block deep."""
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, **k: create(name, depth=1, embed_dim=48, num_heads=2))
    return "naflexvit_base_patch16_gap"


@ran("matmul", "interpolate_cached", "grid_sample")
def test_command_writes_the_report(small_timm, folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (folder / "broken.png").write_text("no image")
    out = tmp_path / "report"
    command = ["drift", "--model", small_timm, "--random-weights", "--images", str(folder), "--out", str(out)]
    assert cli.main([*command, "--max-seq-len", "36", "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr()
    assert "skipped, not readable as an image: broken.png" in printed.err and "random" in printed.out
    report = json.loads((out / "report.json").read_text())
    drifts, facts = report["survey"]["drift"], report["facts"]
    assert report["survey"]["images"] == 3 and report["weights"].startswith("random")
    assert report["headline"] in printed.out and report["verdict"] in printed.out
    assert len(report["skipped"]) == 1 and facts["Number type"] == "bfloat16"
    assert facts["Sequence length"] == "36 patches at most" and "interp_mode bicubic" in str(facts)
    assert {"issue-2514-zeros", "timm-flag-bilinear", "matmul"} <= set(drifts)
    assert report["made"]["command"].startswith("naflex-fast drift --model")
    passes = re.search(r"(\d+) contenders on (\d+) batches: stock, ", printed.err)
    assert int(passes[1]) == len(drifts) and int(passes[2]) == 1
    Page((out / "report.html").read_text())


@ran("matmul")
def test_a_line_every_ten_seconds_without_a_terminal(small_timm, folder, monkeypatch, capsys):
    monkeypatch.setattr("timm_naflex_fast.measure.output.QUIET_SECONDS", 0.0)
    command = ["drift", "--model", small_timm, "--random-weights", "--images", str(folder), "--max-seq-len", "16"]
    assert cli.main([*command, "--contenders", "matmul"]) == 0
    printed = capsys.readouterr()
    assert "2 contenders on 1 batches: stock, matmul\n" in printed.err
    assert "measuring: 50 % done, about 00:0" in printed.err
    assert "Safe to switch to `matmul`: yes" in printed.out


@pytest.mark.parametrize(
    ("option", "value", "messages"),
    [
        ("--contenders", "nope", ["--contenders: invalid choice: 'nope'", *NAMES]),
        ("--dtype", "float8", ["--dtype: invalid choice: 'float8'", "float32", "bfloat16", "float16"]),
        ("--max-seq-len", "0", ["--max-seq-len: invalid positive value: '0'"]),
        ("--max-seq-len", "99999999999", ["--max-seq-len: 99999999999 is more than 65536"]),
        ("--batch-size", "-1", ["--batch-size: "]),
    ],
)
def test_wrong_values_name_the_valid_ones(option, value, messages, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["drift", "--model", "x", option, value])
    err = capsys.readouterr().err
    assert end.value.code == 2 and all(message in err.splitlines()[-1] for message in messages)


def test_folders_without_a_readable_image(small_timm, tmp_path, capsys):
    command = ["drift", "--model", small_timm, "--random-weights", "--images", str(tmp_path)]
    assert cli.main(command) == 2
    assert "holds no image" in capsys.readouterr().err
    (tmp_path / "broken.png").write_text("no image")
    assert cli.main(command) == 2
    assert "none of the images can be read: broken.png" in capsys.readouterr().err


def test_load_model_casts_and_is_seeded(small_timm):
    model, weights = load_model(small_timm, random_weights=True, dtype="float16")
    assert next(model.parameters()).dtype == torch.float16 and weights.startswith("random, untrained, seed 0")
    again, _ = load_model(small_timm, random_weights=True, dtype="float16")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_without_images_and_without_scikit_image(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "skimage", None)
    monkeypatch.setitem(sys.modules, "skimage.data", None)
    assert cli.main(["drift", "--model", "naflexvit_base_patch16_gap"]) == 2
    assert "scikit-image's photos: pip install scikit-image" in capsys.readouterr().err


@ran("matmul")
def test_coordinates_name_the_place_of_a_patch():
    """The kept image and its map follow the coordinates, not the order of the tokens."""
    model = table_model()
    batch = vit_batch([(2, 3)])
    turned = {**batch, "patches": batch["patches"].flip(1), "patch_coord": batch["patch_coord"].flip(1)}
    a, b = (survey(model, [(one, None)], ["matmul", "grid_sample"], pictures=True) for one in (batch, turned))
    assert torch.equal(a.pictures[0].pixels, b.pictures[0].pixels)
    assert torch.equal(row_major([(2, 3)])[0], batch["patch_coord"][0])
