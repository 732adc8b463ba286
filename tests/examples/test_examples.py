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
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from tests.support import tiny_siglip2
from tests.support.running import ran

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


def test_siglip2_embed_gives_what_transformers_gives_for_each_picture_alone(
    tmp_path, monkeypatch, capsys
):
    transformers = pytest.importorskip("transformers")
    tower = tiny_siglip2.tower(patch_size=16)
    processor = transformers.Siglip2ImageProcessor(max_num_patches=40)
    want = []
    for number, size in enumerate([(90, 200), (160, 64), (128, 128)]):
        picture = Image.effect_noise(size, 80).convert("RGB")
        picture.save(tmp_path / f"{number}.png")
        with torch.no_grad():
            want.append(tower(**processor([picture], return_tensors="pt")).pooler_output)
    (tmp_path / "3.png").write_text("no picture")
    tower.save_pretrained(tmp_path / "tower")
    processor.save_pretrained(tmp_path / "tower")

    options = f"--library transformers --max-seq-len 40 --model {tmp_path / 'tower'} --batch-size 2"
    out = str(tmp_path / "embeddings.safetensors")
    monkeypatch.setattr(
        "sys.argv", ["siglip2_embed.py", str(tmp_path), "--out", out, *options.split()]
    )
    with ran("matmul"), suppress(SystemExit):
        runpy.run_path(str(EXAMPLES / "siglip2_embed.py"), run_name="__main__")
    assert "3 embeddings, 1 pictures skipped" in capsys.readouterr().out
    with safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["paths"]) == ["0.png", "1.png", "2.png"]
        torch.testing.assert_close(file.get_tensor("embeddings"), torch.cat(want))


EMBED_ERRORS = {
    "--out no/e.safetensors": "no/e.safetensors cannot be written: No such file or directory",
    "--out e --model naflexvit_base_patch16_siglp": "did you mean naflexvit_base_patch16_siglip?",
    "--out e --library transformers": "needs transformers: pip install transformers",
}


@pytest.mark.parametrize("options", EMBED_ERRORS)
def test_siglip2_embed_tells_in_one_line_what_is_wrong(options, photos, monkeypatch, capsys):
    monkeypatch.chdir(photos)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("sys.argv", ["siglip2_embed.py", ".", *options.split()])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLES / "siglip2_embed.py"), run_name="__main__")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(EMBED_ERRORS[options] + "; nothing is changed" * ("no/" in options))
