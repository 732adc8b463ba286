"""The examples as a user runs them."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import digits
import pytest
from safetensors.torch import load_file

EXAMPLES = Path(digits.__file__).parent
RECORD = json.loads(digits.CHECKPOINT.with_suffix(".json").read_text())


def run(script, *arguments):
    command = [sys.executable, str(EXAMPLES / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_committed_checkpoint_holds_its_promise():
    assert (
        digits.CHECKPOINT.stat().st_size <= 1_000_000
        and RECORD["held_out_accuracy"] >= 0.97
        and RECORD["seed"] == 0
    )
    assert sum(t.numel() for t in load_file(digits.CHECKPOINT).values()) == RECORD["parameters"]


@pytest.mark.slow
def test_drift_report_on_the_digits(tmp_path, children):
    out = run("drift_report.py", "--json", str(tmp_path / "drift.json"))
    (calls,) = children()
    assert {("pos_embed", mode) for mode in ("matmul", "interpolate_cached", "grid_sample")} <= set(
        calls
    )
    report = json.loads((tmp_path / "drift.json").read_text())
    assert (
        "digits_naflexvit.safetensors" in out
        and "digits_naflexvit.safetensors" in report["weights"]
    )
    results = report["survey"]["drift"]
    assert results["stock"]["accuracy"] == pytest.approx(RECORD["held_out_accuracy"], abs=0.002)
    for exact in ("interpolate_cached", "matmul"):
        assert (
            results[exact]["accuracy"] == results["stock"]["accuracy"]
            and results[exact]["agreement"] == 1
        )
        assert results[exact]["embed_max_abs"] <= 2e-6
    assert (
        results["grid_sample"]["embed_rel_rms"] > 0.01 and results["grid_sample"]["agreement"] < 1
    )


def test_drift_report_errors(monkeypatch, capsys):
    lacks, alone = "uv run examples/train_digits.py", "--images goes with --model"
    for option, value, message in (
        ("--checkpoint", "nowhere.safetensors", lacks),
        ("--images", ".", alone),
    ):
        monkeypatch.setattr(sys, "argv", ["drift_report.py", option, value])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(EXAMPLES / "drift_report.py"), run_name="__main__")
        assert left.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_four_forms_agree_and_are_timed():
    table = [line.split() for line in run("four_forms.py", "--rounds", "1").splitlines()[2:]]
    assert [row[0] for row in table] == ["loop", "grouped_conv1d", "frozen_1x1", "matmul"]
    assert all(float(row[3]) <= 2e-6 for row in table)


@pytest.mark.slow
def test_siglip2_is_right_in_both_runtimes():
    for module in ("transformers", "onnxscript", "onnxruntime", "openvino"):
        pytest.importorskip(module)
    out = run("export_siglip2_transformers.py")
    assert "{('pos_embed', 'matmul'): 1}" in out and out.count("largest difference") == 4
