"""Drift: figures, image folders, model loading, the command line and its files."""

import json
from dataclasses import fields

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.support.oracles import small_vit, vit_batch
from tests.support.running import ran
from timm_naflex_fast.cli import main as cli
from timm_naflex_fast.measure.drift.report import columns, row_text
from timm_naflex_fast.measure.drift.survey import Drift, survey
from timm_naflex_fast.measure.images import NaFlexImages, image_sources
from timm_naflex_fast.measure.models import load_model
from timm_naflex_fast.names import STRATEGIES

KEYS = {field.name for field in fields(Drift)}


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    noise = np.random.default_rng(0)
    for name, size in (("wide.png", (40, 120)), ("tall.jpg", (130, 50)), ("more/square.png", (64, 64))):
        Image.fromarray(noise.integers(0, 255, (*size, 3), np.uint8)).save(folder / name)
    return folder


def batches(labels=True):
    for seed in range(2):
        batch = vit_batch([(3, 4), (5, 2), (6, 6)], seed=seed)
        yield batch, torch.tensor([0, 1, 2]) if labels else None


def test_stock_is_zero_exact_is_tiny_grid_sample_is_not():
    found = survey(small_vit(), batches())
    results = found.drift
    assert found.images == 6
    assert list(results) == ["stock", "interpolate_cached", "grid_sample", "matmul"]
    for name in ("stock", "interpolate_cached"):
        assert results[name].embed_max_abs == results[name].pooled_cosine_distance == 0
        assert results[name].agreement == 1 and results[name].accuracy == results["stock"].accuracy
    assert 0 < results["matmul"].embed_max_abs < 1e-5 and results["matmul"].embed_rel_rms < 1e-6
    assert results["grid_sample"].embed_max_abs > 0.1 and results["grid_sample"].embed_rel_rms > 1e-2


@ran("matmul")
def test_without_labels_and_without_a_classifier():
    model = small_vit()
    model.reset_classifier(0)
    found = survey(model, batches(), ["matmul"])
    assert list(found.drift) == ["stock", "matmul"]
    assert found.drift["matmul"].accuracy is None and found.drift["matmul"].agreement is None
    headings = columns(found.drift["stock"])
    assert list(headings) == ["embed_max_abs", "embed_rel_rms", "pooled_cosine_distance", "neighbours"]
    assert len(row_text(found.drift["matmul"], headings)) == 4
    found = survey(small_vit(), batches(labels=False), ["matmul"])
    assert found.drift["matmul"].accuracy is None and found.drift["matmul"].agreement == 1
    assert list(columns(found.drift["stock"]))[-1] == "agreement"


def test_no_images():
    with pytest.raises(ValueError, match="no image"):
        survey(small_vit(), [])


def test_folder_reads_every_shape_and_lists_what_it_cannot(photos):
    (photos / "broken.png").write_text("not an image")
    model = timm.create_model("naflexvit_base_patch16_gap", depth=1, embed_dim=32, num_heads=2)
    folder = NaFlexImages(image_sources(photos), model, max_seq_len=36, batch_size=2)
    shapes = [tuple(inputs["patches"].shape) for inputs, _ in folder]
    assert shapes == [(2, 36, 768), (1, 36, 768)] and len(folder) == 2
    assert len(folder.skipped) == 1 and folder.skipped[0].startswith("broken.png")


def test_load_model_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load_model("naflexvit_base_patch16_gap", tmp_path / "none.safetensors")
    with pytest.raises(
        ValueError, match=r"timm has no NaFlexVit 'naflexvit_nope'; valid: .*naflexvit_base_patch16_gap"
    ):
        load_model("naflexvit_nope")
    with pytest.raises(ValueError, match="no NaFlexVit"):
        load_model("resnet18", random_weights=True)


@pytest.mark.parametrize("kind", ["cut off", "empty", "text", "pickle", "another model"])
def test_a_checkpoint_that_cannot_be_loaded_is_one_line(kind, photos, tmp_path, capsys):
    file = tmp_path / ("weights.pth" if kind == "pickle" else "weights.safetensors")
    save_file({"embeds.pos_embed": torch.ones(100, 100)}, file)
    whole = file.read_bytes()
    contents = {"cut off": whole[: len(whole) // 2], "empty": b"", "text": b"no weights", "pickle": b"\x80\x02no"}
    file.write_bytes(contents.get(kind, whole))
    command = ["drift", "--model", "vit_tiny_patch16_224", "--checkpoint", str(file), "--images", str(photos)]
    assert cli.main(command) == 2
    err = capsys.readouterr().err
    assert f"the checkpoint {file} cannot be loaded" in err and err.count("\n") == 1 and len(err) < 700


@pytest.mark.parametrize("where", ["below", "instead of"])
def test_results_that_cannot_be_written_are_noticed_first(where, photos, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("timm_naflex_fast.cli.drift.load_model", None)  # reached, it would be a traceback
    file = tmp_path / "file"
    file.write_text("")
    target = file / "folder" if where == "below" else file
    command = ["drift", "--model", "naflexvit_base_patch16_gap", "--images", str(photos), "--out", str(target)]
    assert cli.main(command) == 2
    err = capsys.readouterr().err
    assert str(target) in err and err.count("\n") == 1 and file.read_text() == ""


def test_unreachable_hub_says_how_to_give_weights(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no route to the hub")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(RuntimeError, match=r"no route to the hub.*--checkpoint FILE"):
        load_model("naflexvit_base_patch16_siglip.v2_webli")


@ran("matmul", "interpolate_cached", "grid_sample")
def test_command_line_on_a_local_checkpoint(photos, tmp_path, capsys):
    name = "vit_tiny_patch16_224"
    torch.manual_seed(0)
    model = timm.create_model(name, use_naflex=True)
    torch.nn.init.normal_(model.embeds.pos_embed)
    checkpoint = tmp_path / "stand_in.safetensors"
    save_file(model.state_dict(), checkpoint)
    command = ["drift", "--model", name, "--checkpoint", str(checkpoint), "--images", str(photos)]
    command += ["--out", str(tmp_path / "out"), "--contenders", *STRATEGIES]
    assert cli.main([*command, "--max-seq-len", "48"]) == 0
    text = capsys.readouterr().out
    assert "stand_in.safetensors" in text and "3 images" in text and "interpolate_cached" in text
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    drifts = report["survey"]["drift"]
    assert report["model"] == name and report["survey"]["images"] == 3
    assert set(drifts) == {"stock", "interpolate_cached", "grid_sample", "matmul"}
    assert all(set(drift) == KEYS and drift["accuracy"] is None for drift in drifts.values())
    assert drifts["grid_sample"]["embed_max_abs"] > 0.1 > drifts["matmul"]["embed_max_abs"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["drift"], "needs --model NAME"),
        (
            ["drift", "--model", "naflexvit_base_patch16_gap", "--random-weights", "--images", "/nope"],
            "is not a folder",
        ),
        (["drift", "--model", "x", "--checkpoint", "/nope.pth", "--images", "."], "no checkpoint at /nope.pth"),
    ],
)
def test_command_line_errors_are_one_line(arguments, message, capsys):
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert message in err and err.startswith("naflex-fast drift: ") and err.count("\n") == 1
