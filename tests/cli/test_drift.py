"""``naflex-fast drift`` from end to end."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.running import ran
from timm_naflex_fast.cli import main as cli
from timm_naflex_fast.names import STRATEGY_NAMES


@pytest.mark.parametrize(
    ("options", "missing", "says"),
    [
        (["--out", "report"], "matplotlib", "pip install matplotlib jinja2"),
        ([], "skimage", "scikit-image's photos: pip install scikit-image"),
    ],
)
def test_a_missing_package_is_said_before_a_model_is_loaded(
    options, missing, says, photos, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    if missing != "skimage":
        options = [*options, "--images", str(photos)]
    assert cli.main(["drift", "--model", "naflexvit_base_patch16_gap", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and not Path("report").exists()


@ran(*STRATEGY_NAMES)
def test_command_writes_the_report(photos, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(
        "timm_naflex_fast.measure.output.QUIET_SECONDS", 0.0
    )  # every ten seconds a line
    (photos / "broken.png").write_text("no image")
    out = tmp_path / "report"
    model = "--model naflexvit_base_patch16_gap --random-weights --model-kwargs depth=1 embed_dim=48 num_heads=2"
    options = f"--max-seq-len 36 --dtype bfloat16 --images {photos} --out {out}"
    assert cli.main(["drift", *model.split(), *options.split()]) == 0
    printed = capsys.readouterr()
    assert (
        "skipped, not readable as an image: broken.png" in printed.err and "random" in printed.out
    )
    report = json.loads((out / "report.json").read_text())
    drifts, facts = report["survey"]["drift"], report["facts"]
    assert report["survey"]["images"] == 4 and report["weights"].startswith("random")
    assert report["headline"] in printed.out and report["verdict"] in printed.out
    assert len(report["skipped"]) == 1 and facts["Number type"] == "bfloat16"
    assert facts["Sequence length"] == "36 patches at most" and "interp_mode bicubic" in str(facts)
    assert {"timm-flag-bicubic", "timm-flag-bilinear", "matmul"} <= set(drifts)
    assert report["made"]["command"].startswith("naflex-fast drift --model")
    assert re.search(r"measuring: [1-9]\d? % done, about 00:\d\d left", printed.err)
