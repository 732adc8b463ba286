"""The drift report: measures on tensors with known answers, peers inside a model, the written files."""

import html
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from oracles import NEW_TIMM, embed, row_major, small_vit, vit_batch
from PIL import Image

from timm_naflex_fast import cli, status
from timm_naflex_fast.drift import NaFlexImages, load_model, photos, survey
from timm_naflex_fast.drift.command import FILES, write
from timm_naflex_fast.drift.data import Report, groups, read_json, verdict, write_json
from timm_naflex_fast.drift.html import render
from timm_naflex_fast.drift.markdown import render as markdown
from timm_naflex_fast.drift.measure import Drift, Survey
from timm_naflex_fast.drift.metrics import Difference, agreement, cosine_distance, nearest
from timm_naflex_fast.drift.peers import NAMES, PEERS, left_out, standing_in

GRIDS = [(3, 4), (5, 2), (6, 6), (2, 9)]
WITHOUT_HF = [name for name in NAMES if name != "hf-siglip2"]


def batches(labels=False):
    for seed in range(2):
        yield vit_batch(GRIDS, seed=seed), torch.tensor([0, 1, 2, 3]) if labels else None


def table_model(**kwargs):
    return small_vit(pos_embed_interp_mode="bilinear", **kwargs).eval()


# metrics


def test_difference_by_hand():
    difference = Difference()
    difference.add(torch.tensor([3.0, 0.0]), torch.tensor([0.0, 0.0]))
    difference.add(torch.tensor([1.0, 5.0]), torch.tensor([1.0, 9.0]))
    assert difference.max_abs == 4 and difference.rel_rms == pytest.approx((25 / 82) ** 0.5, abs=1e-12)
    difference.add(torch.empty(0, 3), torch.empty(0, 3))
    with pytest.raises(ValueError, match="shapes differ"):
        difference.add(torch.ones(2), torch.ones(1))
    assert difference.max_abs == 4
    assert Difference().rel_rms == 0
    nothing = Difference()
    nothing.add(torch.ones(1), torch.zeros(1))
    assert nothing.rel_rms == float("inf")


def test_cosine_distance_by_hand():
    ours, reference = (
        torch.tensor([[1.0, 0], [0, 2], [3, 3], [-1, 0]]),
        torch.tensor([[5.0, 0], [1, 0], [1, 0], [1, 0]]),
    )
    expected = torch.tensor([0, 1, 1 - 0.5**0.5, 2], dtype=torch.float64)
    torch.testing.assert_close(cosine_distance(ours, reference), expected, atol=1e-12, rtol=0)
    tiny = cosine_distance(torch.tensor([[1.0, 1e-6]]), torch.tensor([[1.0, 0.0]]))
    assert tiny.item() == pytest.approx(5e-13, rel=1e-4), "small angles are not lost"


def test_nearest_by_hand():
    rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 2.0]])
    assert nearest(rows).tolist() == [1, 0, 3, 2]
    assert nearest(rows, ["a", "a", "b", "b"]).tolist() == [3, 3, 1, 1], "an image is no neighbour of itself"
    assert agreement(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 0, 4])) == 0.75
    many = torch.randn(1500, 8)
    directions = F.normalize(many.double(), dim=-1)
    expected = (directions @ directions.t()).fill_diagonal_(-2).argmax(-1)
    assert torch.equal(nearest(many), expected), "more than one part of the similarity matrix"


# peers


def formula(name, table, h, w, mode):
    """What a peer adds to one sample (h*w, C), from the issue's own formula or F.interpolate."""
    nchw = table.permute(0, 3, 1, 2)
    if name.startswith("issue-2514"):
        padding = name.removeprefix("issue-2514-")
        theta = torch.tensor([[[1.0, 0, 0], [0, 1, 0]]])
        grid = F.affine_grid(theta, [1, 1, h, w], align_corners=False)
        out = F.grid_sample(nchw, grid, mode=mode, padding_mode=padding, align_corners=False)
    elif name.startswith("timm-flag"):
        y, x = ((torch.arange(n) * 2 + 1) / n - 1 for n in (h, w))
        grid = torch.stack(torch.meshgrid(y, x, indexing="ij")[::-1], -1)[None]
        mode = name.removeprefix("timm-flag-")
        out = F.grid_sample(nchw, grid, mode=mode, padding_mode="border", align_corners=False)
    else:
        mode = "bilinear" if name == "hf-siglip2" else name.split("-")[0]
        out = F.interpolate(nchw, (h, w), mode=mode, antialias="no-antialias" not in name, align_corners=False)
    return out[0].flatten(1).t()


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("name", PEERS)
def test_peer_inside_a_model_equals_its_formula(name, mode):
    model = small_vit(pos_embed_interp_mode=mode).eval()
    why = left_out(name, model.embeds)
    if why is not None:
        assert name == mode or not NEW_TIMM or name == "hf-siglip2"
        pytest.skip(why)
    batch = vit_batch(GRIDS)
    with torch.no_grad():
        plain = model.embeds.norm(model.embeds.proj(batch["patches"]))
    with standing_in(name, model):
        got = embed(model, batch)
    for sample, (h, w) in enumerate(GRIDS):
        want = plain[sample, : h * w] + formula(name, model.embeds.pos_embed.detach(), h, w, mode)
        torch.testing.assert_close(got[sample, : h * w], want, atol=3e-6, rtol=0)


@pytest.mark.parametrize("name", WITHOUT_HF)
def test_everything_is_put_back_after_an_error(name):
    model = table_model()
    if left_out(name, model.embeds) is not None:
        return
    before, stock = dict(model.embeds.__dict__), embed(model)
    with pytest.raises(RuntimeError, match="half way"), standing_in(name, model):
        assert name in ("stock", "interpolate_cached", "matmul") or not torch.equal(embed(model), stock)
        raise RuntimeError("half way")
    assert model.embeds.__dict__ == before and status().flags.is_stock
    assert torch.equal(embed(model), stock)


def test_what_cannot_be_measured_is_left_out_with_the_reason():
    model = table_model()
    assert "own setting" in left_out("bilinear", model.embeds)
    assert left_out("bicubic", model.embeds) is None and left_out("matmul", model.embeds) is None
    factorized = small_vit(pos_embed="factorized")
    assert "factorized" in left_out("issue-2514-zeros", factorized.embeds)
    found = survey(factorized, batches(), NAMES)
    assert list(found.drift) == ["stock", "interpolate_cached", "grid_sample", "matmul"]
    assert set(found.left_out) == set(PEERS)
    with pytest.raises(ValueError, match=r"'nope' cannot be measured; valid: stock, .*issue-2514-zeros"):
        survey(model, batches(), ["nope"])
    with pytest.raises(ValueError, match="cannot be the baseline: it is the model's own setting"):
        survey(model, batches(), baseline="bilinear")


# the survey


def test_survey_of_a_tiny_model():
    model = table_model(pos_embed_grid_size=(12, 8)).train()
    found = survey(model, batches(labels=True), WITHOUT_HF, pictures=3)
    assert model.training and found.images == 8 and not torch.is_inference(model.embeds.pos_embed)
    assert all(found.exact(name) for name in ("stock", "interpolate_cached", "matmul"))
    assert not found.exact("grid_sample") and found.drift["stock"].embed_max_abs == 0
    # The same thing by another way, in a model that takes it through all its blocks.
    for a, b in (("grid_sample", "timm-flag-bilinear"), ("grid_sample", "issue-2514-border")):
        assert found.drift[a].embed_rel_rms == pytest.approx(found.drift[b].embed_rel_rms, rel=1e-4)
        assert found.blocks[a] == pytest.approx(found.blocks[b], rel=1e-4)
    zeros, border = (found.drift[f"issue-2514-{padding}"] for padding in ("zeros", "border"))
    assert abs(zeros.embed_rel_rms - border.embed_rel_rms) > 1e-3, "padding counts at the border"
    assert all(len(values) == len(model.blocks) for values in found.blocks.values())
    assert [grid.grid for grid in found.grids] == [(5, 2), (6, 6), (3, 4), (2, 9)]
    assert [grid.shrink for grid in found.grids] == [4, 2, 4, 6] and found.grids[0].aspect == 0.4
    assert sum(grid.images for grid in found.grids) == 8
    one = found.pictures[0]
    assert one.grid == (3, 4) and set(one.maps) == {"matmul", "grid_sample", "issue-2514-zeros"}
    assert np.asarray(one.maps["grid_sample"]).shape == (3, 4)
    assert len({picture.grid for picture in found.pictures}) == 3


@pytest.mark.skipif(not NEW_TIMM, reason="this timm's forward_intermediates takes no NaFlex batch")
def test_per_block_drift_is_that_of_forward_intermediates():
    model = table_model()
    batch = vit_batch(GRIDS)
    found = survey(model, [(batch, None)], ["grid_sample"])
    outputs = {}
    for name in ("stock", "grid_sample"):
        with standing_in(name, model), torch.no_grad():
            outputs[name] = model.forward_intermediates(batch, output_fmt="NLC")[1]
    for value, ours, stock in zip(found.blocks["grid_sample"], outputs["grid_sample"], outputs["stock"]):
        ours, stock = ours[batch["patch_valid"]].double(), stock[batch["patch_valid"]].double()
        assert value == pytest.approx(((ours - stock).square().sum() / stock.square().sum()).sqrt().item(), rel=1e-6)


def test_another_baseline_and_another_dtype():
    model = table_model().to(torch.bfloat16)
    found = survey(model, batches(), ["stock", "matmul", "grid_sample"], baseline="grid_sample")
    assert list(found.drift) == ["grid_sample", "stock", "matmul"] and found.drift["grid_sample"].embed_rel_rms == 0
    assert not found.exact("stock") and found.drift["stock"].embed_rel_rms > 1e-2
    exact = survey(model, batches(), ["matmul"])
    assert exact.exact("matmul") and exact.drift["matmul"].embed_rel_rms < 1e-3
    assert next(model.parameters()).dtype == torch.bfloat16


# the words


def one_survey(**drifts):
    drift = {"stock": Drift(0, 0, 0, 1, 1, 0.9), **drifts}
    return Survey(40, "stock", 2e-6, drift, {name: [value.embed_rel_rms] for name, value in drift.items()}, [], {})


def test_verdict_is_one_sentence_from_the_figures():
    exact, moved = Drift(5e-7, 6e-8, 1e-14, 1, 1, 0.9), Drift(1.5, 0.12, 0.01, 0.75, 0.9, 0.85)
    text = verdict(one_survey(matmul=exact, grid_sample=moved, bicubic=Drift(0.5, 0.04, 0.01, 1, 1, 0.9)))
    assert text == (
        "On 40 images, matmul gives timm's own result but for rounding (embeddings within 5.0e-07); grid_sample moves "
        "the embeddings by 12.0 % (RMS), gives 25.0 % of the images another nearest neighbour and takes accuracy from "
        "90.00 % to 85.00 %; the 1 other way measured moves them by 4.0 % (bicubic)."
    )
    assert verdict(one_survey(matmul=exact), stand_in=True).endswith(
        "with stand-in weights, a trained model may differ."
    )
    assert "bit for bit" in verdict(one_survey(interpolate_cached=Drift(0, 0, 0, 1, 1, 0.9)))
    assert "nothing was compared" in verdict(one_survey())


def test_groups_put_equal_curves_together():
    exact, moved, less = (Drift(x, x, 0, 1, 1, None) for x in (0, 0.1, 0.05))
    close = Drift(0.1, 0.1001, 0, 1, 1, None)
    found = groups(one_survey(matmul=exact, grid_sample=moved, bicubic=less, **{"timm-flag-bicubic": close}))
    assert found == [["stock", "matmul"], ["grid_sample", "timm-flag-bicubic"], ["bicubic"]]


# the files


class Page(HTMLParser):
    """Counts what a page holds and checks that what opens is closed."""

    EMPTY = ("meta", "img")

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
    found = survey(table_model(), batches(labels=True), WITHOUT_HF, pictures=2)
    made = dict(command="naflex-fast drift <x>", date="2026-01-01", commit=None, machine="m", torch="2", timm="1")
    weights = "stand-in: drawn & random"
    return Report("tiny <vit>", weights, True, "noise", ["a.png: <no>"], "float32", 4, [36], "bilinear", found, made)


def test_page_is_whole_and_needs_nothing_from_outside(report):
    text = render(report)
    page = Page(text)
    assert page.tags.count("svg") == 4 and page.tags.count("table") == 1
    maps = sum(1 + len(picture.maps) for picture in report.survey.pictures)
    assert page.tags.count("img") == maps == 8
    assert page.outside == [] and "http" not in text and "url(" not in re.sub(r"url\(#", "", text)
    assert len(page.ids) == len(set(page.ids))
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text))
    assert {one for pair in used for one in pair if one} == set(page.ids)
    assert "currentColor" in text and "prefers-color-scheme: dark" in text
    assert "tiny &lt;vit&gt;" in text and "<vit>" not in text and "a.png: &lt;no&gt;" in text
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", text)
    assert len(captions) == 6 and all("stand-in: drawn &amp; random" in caption for caption in captions)
    assert "stand-in" in re.search(r"<title>(.*?)</title>", text)[1]
    for name in report.survey.drift:
        assert f'<th scope="row">{name}' in text


def test_renderings_read_only_the_data(report, tmp_path):
    write(report, tmp_path / "a")
    again = read_json(tmp_path / "a" / "report.json")
    assert again == report
    write(again, tmp_path / "b")
    for name in FILES:
        assert (tmp_path / "a" / name).read_text() == (tmp_path / "b" / name).read_text()
    text = (tmp_path / "a" / "report.md").read_text()
    assert report.verdict in text and all(f"| `{name}" in text for name in report.survey.drift)
    (tmp_path / "bad.json").write_text('{"model": 1}')
    with pytest.raises(ValueError, match="is not a report of naflex-fast drift"):
        read_json(tmp_path / "bad.json")


@pytest.mark.parametrize("name", ["digits", "photos"])
def test_committed_reports_are_small_and_name_their_weights(name):
    folder = Path(__file__).resolve().parents[1] / "results" / "drift" / name
    found = read_json(folder / "report.json")
    assert markdown(found) == (folder / "report.md").read_text(), "render it again"
    text = (folder / "report.html").read_text()
    page = Page(text)
    assert page.outside == [] and html.escape(found.verdict) in text
    assert text.count(html.escape(f"Weights: {found.weights}.")) == 1 + 4 + len(found.survey.pictures)
    assert found.stand_in == (name == "photos") == ("Stand-in weights" in text)
    assert all(found.survey.exact(exact) for exact in ("interpolate_cached", "matmul"))
    assert sum(path.stat().st_size for path in folder.iterdir()) < 250_000


def test_json_schema(report, tmp_path):
    write_json(tmp_path / "report.json", report)
    record = json.loads((tmp_path / "report.json").read_text())
    assert set(record) == {
        *("model", "weights", "stand_in", "source", "skipped", "dtype", "patch_size", "max_seq_len", "resampling"),
        *("survey", "made", "verdict"),
    }
    found = record["survey"]
    assert set(found) == {
        *("images", "baseline", "tolerance", "drift", "blocks", "grids", "left_out", "pictures"),
    }
    names = set(found["drift"])
    assert names == set(found["blocks"]) == set(found["grids"][0]["embed_rel_rms"])
    for drift in found["drift"].values():
        assert set(drift) == {
            *("embed_max_abs", "embed_rel_rms", "pooled_cosine_distance", "neighbours", "agreement", "accuracy"),
        }
    assert {type(value) for row in found["pictures"][0]["maps"]["grid_sample"] for value in row} == {float}


def test_without_matplotlib_it_says_so_before_measuring(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("timm_naflex_fast.drift.command.load_model", None)
    assert cli.main(["drift", "--model", "naflexvit_base_patch16_gap", "--out", str(tmp_path)]) == 2
    assert "need matplotlib: pip install matplotlib" in capsys.readouterr().err


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
    monkeypatch.setattr(timm, "create_model", lambda name, **kwargs: create(name, depth=1, embed_dim=48, num_heads=2))
    return "naflexvit_base_patch16_gap"


def test_command_writes_the_report(small_timm, folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (folder / "broken.png").write_text("no image")
    out = tmp_path / "report"
    command = ["drift", "--model", small_timm, "--random-weights", "--images", str(folder), "--out", str(out)]
    assert cli.main([*command, "--max-seq-len", "16", "36", "--dtype", "bfloat16", "--json", str(tmp_path / "j")]) == 0
    printed = capsys.readouterr()
    assert "skipped, not readable as an image: broken.png" in printed.err and "stand-in" in printed.out
    report = read_json(out / "report.json")
    assert report.survey.images == 6 and report.stand_in and report.dtype == "bfloat16"
    assert report.verdict in printed.out and len(report.skipped) == 1 and report.max_seq_len == [16, 36]
    assert {"issue-2514-zeros", "timm-flag-bilinear", "matmul"} <= set(report.survey.drift)
    assert report.made["command"].startswith("naflex-fast drift --model")
    Page((out / "report.html").read_text())


def test_strategies_and_baseline_of_the_command(small_timm, folder, tmp_path):
    out = tmp_path / "figures.json"
    command = ["drift", "--model", small_timm, "--random-weights", "--images", str(folder), "--max-seq-len", "16"]
    command += ["--strategies", "matmul", "timm-flag-bilinear", "--baseline", "grid_sample", "--json", str(out)]
    assert cli.main(command) == 0
    assert list(json.loads(out.read_text())["strategies"]) == ["grid_sample", "matmul", "timm-flag-bilinear"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "nope"], "invalid choice: 'nope'"),
        (["--baseline", "nope"], "invalid choice: 'nope'"),
        (["--dtype", "float8"], "invalid choice: 'float8'"),
    ],
)
def test_unknown_names_list_the_valid_ones(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["drift", "--model", "x", *arguments])
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and message in err and ("stock" in err or "bfloat16" in err)


def test_folders_without_a_readable_image(small_timm, tmp_path, capsys):
    command = ["drift", "--model", small_timm, "--random-weights", "--images", str(tmp_path)]
    assert cli.main(command) == 2
    assert "holds no image" in capsys.readouterr().err
    (tmp_path / "broken.png").write_text("no image")
    assert cli.main(command) == 2
    assert "none of the images can be read: broken.png" in capsys.readouterr().err


def test_load_model_checks_dtype_and_patch_size(small_timm):
    with pytest.raises(ValueError, match="'float8' cannot be measured; valid: float32, bfloat16, float16"):
        load_model(small_timm, random_weights=True, dtype="float8")
    with pytest.raises(ValueError, match="patch_size must be at least 1"):
        load_model(small_timm, random_weights=True, patch_size=0)
    model, weights = load_model(small_timm, random_weights=True, dtype="float16")
    assert next(model.parameters()).dtype == torch.float16 and weights.startswith("stand-in: random, untrained, seed 0")
    again, _ = load_model(small_timm, random_weights=True, dtype="float16")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_another_patch_size_goes_through_timms_patch_kernels(folder):
    model = small_vit(patch_size=8, in_chans=3, enable_patch_interpolator=True)
    sources = [(path.name, lambda path=path: Image.open(path)) for path in sorted(folder.iterdir())]
    images = NaFlexImages(sources, model, max_seq_len=12, patch_size=4)
    inputs, _ = next(iter(images))
    assert inputs["patches"].shape == (3, 12, 4, 4, 3) and inputs["names"] == ["0.png", "1.png", "2.png"]
    found = survey(model, images, ["matmul"], pictures=1)
    assert found.exact("matmul") and found.images == 3 and found.pictures[0].jpeg
    with pytest.raises(ValueError, match="at least 1"):
        NaFlexImages(sources, model, max_seq_len=[16, 0])


def test_photos_of_scikit_image():
    pytest.importorskip("skimage")
    sources = photos.photos()
    assert len(sources) == len(photos.NAMES) * len(photos.ASPECTS)
    assert len({name for name, _ in sources}) == len(sources)
    for (w, h), photo, (name, load) in zip(photos.ASPECTS, photos.NAMES, sources):
        image = load()
        assert name == f"{photo} {w}:{h}" and image.width / image.height == pytest.approx(w / h, rel=0.02)


def test_without_images_and_without_scikit_image(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "skimage", None)
    monkeypatch.setitem(sys.modules, "skimage.data", None)
    assert cli.main(["drift", "--model", "naflexvit_base_patch16_gap"]) == 2
    assert "scikit-image's photos: pip install scikit-image" in capsys.readouterr().err


def test_coordinates_name_the_place_of_a_patch():
    """The kept image and its map follow the coordinates, not the order of the tokens."""
    model = table_model()
    batch = vit_batch([(2, 3)])
    turned = {**batch, "patches": batch["patches"].flip(1), "patch_coord": batch["patch_coord"].flip(1)}
    a, b = (survey(model, [(one, None)], ["matmul", "timm-flag-bicubic"], pictures=1) for one in (batch, turned))
    assert a.pictures[0].jpeg == b.pictures[0].jpeg
    assert torch.equal(row_major([(2, 3)])[0], batch["patch_coord"][0])
