"""The examples as a user runs them."""

import ast
import json
import runpy
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import digits
import pytest
from safetensors.torch import load_file

EXAMPLES = Path(digits.__file__).parent
RECORD = json.loads(digits.CHECKPOINT.with_suffix(".json").read_text())


def test_committed_checkpoint_holds_its_promise():
    assert digits.CHECKPOINT.stat().st_size <= 1_000_000
    assert RECORD["held_out_accuracy"] >= 0.97
    assert RECORD["seed"] == 0
    weights = load_file(digits.CHECKPOINT)
    assert sum(tensor.numel() for tensor in weights.values()) == RECORD["parameters"]


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_every_example_has_help(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [script.name, "--help"])
    # What an example needs beyond PyTorch and timm, its help does without.
    for package in ("sklearn", "skimage"):
        monkeypatch.setitem(sys.modules, package, None)
    with suppress(SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    out = capsys.readouterr().out
    first = ast.get_docstring(ast.parse(script.read_text())).splitlines()[0]
    assert first in out


@pytest.mark.slow
def test_drift_report_on_the_digits(tmp_path, children):
    command = [sys.executable, EXAMPLES / "drift_report.py", "--json", tmp_path / "drift.json"]
    out = subprocess.check_output(command, text=True)
    (calls,) = children()
    for mode in ("matmul", "interpolate_cached", "grid_sample"):
        assert ("pos_embed", mode) in calls

    report = json.loads((tmp_path / "drift.json").read_text())
    assert "digits_naflexvit.safetensors" in out
    assert "digits_naflexvit.safetensors" in report["weights"]
    drift = report["survey"]["drift"]
    stock = drift["stock"]
    assert stock["accuracy"] == pytest.approx(RECORD["held_out_accuracy"], abs=0.002)
    for exact in ("interpolate_cached", "matmul"):
        assert drift[exact]["accuracy"] == stock["accuracy"]
        assert drift[exact]["agreement"] == 1
        assert drift[exact]["embed_max_abs"] <= 2e-6
    assert drift["grid_sample"]["embed_rel_rms"] > 0.01
    assert drift["grid_sample"]["agreement"] < 1
