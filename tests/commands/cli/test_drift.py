"""``naflex-fast drift`` from end to end."""

import json
import re
import sys
from io import StringIO
from pathlib import Path

import pytest

from tests.support.checks import full_disk
from tests.support.json_page import named
from tests.support.running import ran
from timm_naflex_fast.commands.cli import main as cli
from timm_naflex_fast.names import STRATEGY_NAMES

SMALL = (
    "--model naflexvit_base_patch16_gap --random-weights --max-seq-len 16 "
    "--model-kwargs depth=1 embed_dim=48 num_heads=2"
).split()


@pytest.mark.parametrize(
    ("options", "missing", "says"),
    [
        (["--out", "report"], "jinja2", "--out needs jinja2: pip install jinja2"),
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
    pytest.importorskip("jinja2")
    (photos / "broken.png").write_text("no image")
    options = (
        "--model naflexvit_base_patch16_gap --random-weights --max-seq-len 36 "
        f"--model-kwargs depth=1 embed_dim=48 num_heads=2 --images {photos} --out {tmp_path}/report"
    )
    with ran(*STRATEGY_NAMES):
        assert cli.main(["drift", *options.split()]) == 0
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert report["survey"]["images"] == 4
    assert {"stock", *STRATEGY_NAMES} == {*report["survey"]["drift"]}
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


@ran(*STRATEGY_NAMES)
def test_with_json_on_stdout_the_words_go_to_stderr(photos, capsys):
    given = ["drift", *SMALL, "--images", str(photos), "--json", "-"]
    assert cli.main(given) == 0
    out, err = capsys.readouterr()
    assert "matmul" in json.loads(out)["survey"]["drift"]
    assert "Drift from timm's result" in err


@ran(*STRATEGY_NAMES)
def test_the_bar_counts_pictures_in_each_mode_and_ends_full(photos, monkeypatch):
    terminal = StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    assert cli.main(["drift", *SMALL, "--images", str(photos)]) == 0
    assert re.search(r"measuring: 100%.* 16/16 ", terminal.getvalue())  # four pictures, four modes


@ran(*STRATEGY_NAMES)
@pytest.mark.parametrize("options", [["--json", "old.json"], ["--out", "."]])
def test_on_a_full_disk_the_old_file_stays_and_nothing_is_beside_it(
    options, photos, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    names = ("old.json", "report.html", "report.json")
    for name in names:
        Path(name).write_text("old")
    given = ["drift", *SMALL, "--images", str(photos), *options]
    with full_disk(100):
        assert cli.main(given) == 2
    assert "cannot be written: File too large; nothing is changed" in capsys.readouterr().err
    assert {file.name for file in Path().iterdir() if file.is_file()} == {*names}
    assert not [*Path().glob(".*")]
    assert {Path(name).read_text() for name in names} == {"old"}
