"""``naflex-fast drift`` from end to end."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.json_page import named
from tests.support.running import ran
from timm_naflex_fast.commands.cli import main as cli
from timm_naflex_fast.commands.measure.contenders import CONTENDERS
from timm_naflex_fast.names import STRATEGY_NAMES

SMALL = (
    "--model naflexvit_base_patch16_gap --random-weights --max-seq-len 16 "
    "--model-kwargs depth=1 embed_dim=48 num_heads=2"
).split()


@pytest.mark.parametrize(
    ("options", "missing", "says"),
    [
        (["--out", "report"], "matplotlib", "--out needs matplotlib: pip install matplotlib"),
        ([], "skimage", "pip install scikit-image"),
    ],
)
def test_what_cannot_be_measured_is_said_before_a_model_is_loaded(
    options, missing, says, photos, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("timm_naflex_fast.commands.cli.drift.load_as_chosen", None)
    monkeypatch.setitem(sys.modules, missing, None)
    if missing != "skimage":
        options = [*options, "--images", str(photos)]
    assert cli.main(["drift", "--model", "naflexvit_base_patch16_gap", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and not Path("report").exists()


def test_what_the_command_prints_and_what_the_report_holds(photos, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (photos / "broken.png").write_text("no image")
    options = (
        "--model naflexvit_base_patch16_gap --random-weights --max-seq-len 36 --dtype bfloat16 --batch-size 2 "
        f"--model-kwargs depth=1 embed_dim=48 num_heads=2 --images {photos} --out {tmp_path}/report"
    )
    with ran(*STRATEGY_NAMES):
        assert cli.main(["drift", *options.split()]) == 0
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["survey"]["images"] == 4
    assert {*CONTENDERS} == {*report["survey"]["drift"]}
    survey = report["survey"]
    found = {*report, *survey, *survey["drift"]["matmul"], *survey["grids"][0]}
    assert found == named("drift") - {"null", "stock"}
    assert report["weights"].startswith("random")
    assert len(report["skipped"]) == 1
    assert report["made"]["command"].startswith("naflex-fast drift --model")

    out, err = capsys.readouterr()
    assert "weights: random" in out
    assert report["headline"] in out
    assert "skipped, not readable as images: 1; broken.png: " in err
    assert "measuring" not in err  # progress is for terminals


@ran("matmul")
def test_with_json_on_stdout_the_words_go_to_stderr(photos, capsys):
    given = ["drift", *SMALL, "--images", str(photos), "--modes", "matmul", "--json", "-"]
    assert cli.main(given) == 0
    out, err = capsys.readouterr()
    assert set(json.loads(out)["survey"]["drift"]) == {"stock", "matmul"}
    assert "Drift from timm's result" in err
