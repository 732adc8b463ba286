"""``naflex-fast drift`` from end to end."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import timm

from tests.support.running import ran
from timm_naflex_fast.cli import main as cli
from timm_naflex_fast.names import STRATEGY_NAMES


@pytest.mark.parametrize(
    ("options", "missing", "says"),
    [
        (["--out", "FILE/folder"], None, "FILE/folder"),
        (["--out", "FILE"], None, "FILE"),
        (["--out", "report"], "matplotlib", "needs matplotlib: pip install matplotlib"),
        ([], "skimage", "scikit-image's photos: pip install scikit-image"),
    ],
)
def test_what_cannot_be_done_is_said_before_a_model_is_loaded(options, missing, says, tmp_path, monkeypatch, capsys):
    missing or pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("FILE").touch()
    monkeypatch.setattr("timm_naflex_fast.cli.drift.load_model", None)  # reached, it would be a traceback
    monkeypatch.setitem(sys.modules, missing or "none", None)
    assert cli.main(["drift", "--model", "naflexvit_base_patch16_gap", *options]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and Path("FILE").read_text() == ""


@pytest.fixture
def small_timm(monkeypatch):
    """timm's models, one block deep."""
    monkeypatch.setattr(timm, "create_model", partial(timm.create_model, depth=1, embed_dim=48, num_heads=2))


def drift(photos, *arguments):
    command = ["drift", "--model", "naflexvit_base_patch16_gap", "--random-weights", "--images", str(photos)]
    return cli.main([*command, *arguments])


@ran(*STRATEGY_NAMES)
def test_command_writes_the_report(small_timm, photos, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (photos / "broken.png").write_text("no image")
    out = tmp_path / "report"
    assert drift(photos, "--out", str(out), "--max-seq-len", "36", "--dtype", "bfloat16") == 0
    printed = capsys.readouterr()
    assert "skipped, not readable as an image: broken.png" in printed.err and "random" in printed.out
    report = json.loads((out / "report.json").read_text())
    drifts, facts = report["survey"]["drift"], report["facts"]
    assert report["survey"]["images"] == 4 and report["weights"].startswith("random")
    assert report["headline"] in printed.out and report["verdict"] in printed.out
    assert len(report["skipped"]) == 1 and facts["Number type"] == "bfloat16"
    assert facts["Sequence length"] == "36 patches at most" and "interp_mode bicubic" in str(facts)
    assert {"issue-2514-zeros", "timm-flag-bilinear", "matmul"} <= set(drifts)
    assert report["made"]["command"].startswith("naflex-fast drift --model")
    assert f"{len(drifts)} contenders on 1 batches: stock, " in printed.err


@ran("matmul")
def test_a_line_every_ten_seconds_without_a_terminal(small_timm, photos, monkeypatch, capsys):
    monkeypatch.setattr("timm_naflex_fast.measure.output.QUIET_SECONDS", 0.0)
    assert drift(photos, "--max-seq-len", "16", "--contenders", "matmul") == 0
    printed = capsys.readouterr()
    assert "2 contenders on 1 batches: stock, matmul\n" in printed.err
    assert "measuring: 50 % done, about 00:0" in printed.err
    assert "Safe to switch to `matmul`: yes" in printed.out
