"""The two ports in examples/ agree with the original; where a line of one is broken, ``compare``
says at which stage it shows, and why."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from timm_naflex_fast.commands.recordings.compare import compare_folders

ROOT = Path(__file__).parents[3]
KIT = ROOT / "recordings" / "siglip2_naflex_tiny"
WEIGHTS = KIT / "weights" / "transformers.safetensors"
NUMPY = ROOT / "examples" / "port_in_numpy.py"
JAVASCRIPT = ROOT / "examples" / "port_in_javascript" / "port.mjs"
ABOUT = json.loads((KIT / "recording.json").read_text(encoding="utf-8"))

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
IN_NUMPY = pytest.param(NUMPY, id="numpy")
IN_JAVASCRIPT = pytest.param(JAVASCRIPT, id="javascript", marks=needs_node)


def run(port, folder, weights=WEIGHTS, *, has_own_pixels=False):
    """Run a port on the kit; it writes into the folder."""
    if port.suffix == ".mjs":
        command = ["node", port, KIT, folder, weights]
    else:
        command = [sys.executable, port, KIT, folder, "--weights", weights]
        if not has_own_pixels:
            command.append("--pixels")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("port", [IN_NUMPY, IN_JAVASCRIPT])
def test_from_the_recorded_pixels_a_port_is_right_at_every_stage(port, tmp_path):
    run(port, tmp_path)
    found = compare_folders(KIT, tmp_path)
    assert (found.first, found.missing) == (None, [])
    assert found.not_written == ["grid", "pixels"]


def test_from_the_pictures_the_port_in_numpy_is_right_at_every_stage(tmp_path):
    run(NUMPY, tmp_path, has_own_pixels=True)
    found = compare_folders(KIT, tmp_path)
    assert (found.first, found.not_written) == (None, [])
    assert max(row.share for row in found.rows if row.stage == "pixels") <= 1  # grey level


def test_the_port_in_numpy_says_in_a_line_that_there_are_no_weights(tmp_path):
    weights = tmp_path / "weights.safetensors"
    command = [sys.executable, NUMPY, KIT, tmp_path / "port", "--weights", weights]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (2, f"{weights} is not there\n")
    assert not (tmp_path / "port").exists()


@pytest.mark.parametrize("port", [IN_NUMPY, IN_JAVASCRIPT])
def test_a_port_reads_weights_in_bfloat16_and_under_the_names_of_a_whole_model(port, tmp_path):
    halves = {name: one.bfloat16() for name, one in load_file(WEIGHTS).items()}
    plain = {name: one.float() for name, one in halves.items()}
    whole = {f"vision_model.{name}": one for name, one in halves.items()}
    whole["text_model.head.bias"] = torch.zeros(3)
    save_file(plain, tmp_path / "plain.safetensors")
    save_file(whole, tmp_path / "whole.safetensors")

    run(port, tmp_path / "plain", tmp_path / "plain.safetensors")
    run(port, tmp_path / "whole", tmp_path / "whole.safetensors")
    expected = load_file(tmp_path / "plain" / "stages.safetensors")
    found = load_file(tmp_path / "whole" / "stages.safetensors")
    assert list(found) == list(expected)
    for name, numbers in found.items():
        assert torch.equal(numbers, expected[name])


# A line of a port, what stands there instead, and the mistake's name in recording.json.
BROKEN = [
    (NUMPY, "patches.transpose(0, 2, 1, 3, 4)", "patches.transpose(0, 2, 4, 1, 3)", "patch_cyx"),
    (NUMPY, "+ position_embeddings(table, h, w)", "+ position_embeddings(table, w, h)", "size"),
    (NUMPY, "return pool(x, weights, heads)", "return x.mean(axis=0)", "mean_pooled"),
    (JAVASCRIPT, "const EPS = 1e-6", "const EPS = 1e-5", "eps_1e-5"),
    (JAVASCRIPT, "const scale = 1 / Math.sqrt(headSize)", "const scale = 1", "no_scale"),
    (JAVASCRIPT, 'x = layerNorm(x, weights, "post_layernorm");', "", "no_last_norm"),
]


@pytest.mark.parametrize(("port", "right", "wrong", "mistake"), BROKEN)
def test_a_broken_line_is_found_at_its_stage_with_its_reason(port, right, wrong, mistake, tmp_path):
    if port == JAVASCRIPT and shutil.which("node") is None:
        pytest.skip("node is not installed")
    source = port.read_text(encoding="utf-8")
    assert source.count(right) == 1
    copy = tmp_path / port.name
    copy.write_text(source.replace(right, wrong), encoding="utf-8")
    known = {one["name"]: one for one in ABOUT["mistakes"]}
    words = "the table is resampled otherwise: bilinear, antialiased, sizes read as (w, h)"
    stage = "position_embedding"
    if mistake in known:
        words, stage = known[mistake]["words"], known[mistake]["stage"]

    run(copy, tmp_path / "port", has_own_pixels=stage == "pixels")
    found = compare_folders(KIT, tmp_path / "port")
    assert found.first.stage == stage
    assert (found.reason.known, found.reason.words) == (True, words)
