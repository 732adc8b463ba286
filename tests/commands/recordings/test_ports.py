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

from timm_naflex_fast.commands.cli import main as cli

ROOT = Path(__file__).parents[3]
KIT = ROOT / "recordings" / "siglip2_naflex_tiny"
WEIGHTS = KIT / "weights" / "transformers.safetensors"
NUMPY = ROOT / "examples" / "port_in_numpy.py"
JAVASCRIPT = ROOT / "examples" / "port_in_javascript" / "port.mjs"
ABOUT = json.loads((KIT / "recording.json").read_text(encoding="utf-8"))
STAGES = [stage["name"] for stage in ABOUT["stages"]]
WORDS = {mistake["name"]: mistake["words"] for mistake in ABOUT["mistakes"]}
GREY_LEVEL = 2 / 255  # pixels reach from -1 to 1

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


def compared(folder):
    """What ``compare`` says of a port: its exit status, and its JSON."""
    file = folder / "compare.json"
    status = cli.main(["compare", str(KIT), str(folder), "--json", str(file)])
    return status, json.loads(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("port", [IN_NUMPY, IN_JAVASCRIPT])
def test_from_the_recorded_pixels_a_port_is_right_at_every_stage(port, tmp_path):
    run(port, tmp_path)
    status, said = compared(tmp_path)
    assert status == 0
    assert said["precision"] == "float32"
    assert said["pictures"] == len(ABOUT["pictures"])
    assert said["not_compared"] == ["grid", "pixels"]


def test_from_the_pictures_the_port_in_numpy_is_right_at_every_stage(tmp_path):
    run(NUMPY, tmp_path, has_own_pixels=True)
    status, said = compared(tmp_path)
    assert status == 0
    assert said["not_compared"] == []
    rows = {row["stage"]: row for row in said["stages"]}
    assert list(rows) == STAGES
    assert rows["pixels"]["largest"] <= GREY_LEVEL


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
BROKEN_NUMPY = [
    ("patches.transpose(0, 2, 1, 3, 4)", "patches.transpose(0, 2, 4, 1, 3)", "patch_cyx"),
    ("Image.Resampling.BILINEAR", "Image.Resampling.BICUBIC", "bicubic"),
    (
        "x + position_embeddings(table, h, w)",
        "x + position_embeddings(table, w, h)",
        "size_transposed",
    ),
    ("reach = max(scale, 1)", "reach = 1", "table_not_antialiased"),
    (
        "return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))",
        "return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))",
        "exact_gelu",
    ),
    (
        'stages["pooled"] = pool(x, weights, heads)',
        'stages["pooled"] = x.mean(axis=0)',
        "mean_pooled",
    ),
]
BROKEN_JAVASCRIPT = [
    ("weight * table.numbers", "2 * weight * table.numbers", "position_twice"),
    ("about.table_size, grid)", "about.table_size, [...grid].reverse())", "size_transposed"),
    ("const EPS = 1e-6", "const EPS = 1e-5", "eps_1e-5"),
    ("const scale = 1 / Math.sqrt(headSize)", "const scale = 1", "no_scale"),
    ('x = layerNorm(x, weights, "post_layernorm");', "", "no_last_norm"),
    (
        "const query = multiply(probe, third(kernel, 0), third(bias, 0));",
        "const query = probe;",
        "probe_not_projected",
    ),
]


def broken(port, marks, breaks):
    """A case of the test below for each break of a port."""
    cases = []
    for right, wrong, mistake in breaks:
        case = pytest.param(port, right, wrong, mistake, id=f"{port.name}-{mistake}", marks=marks)
        cases.append(case)
    return cases


@pytest.mark.parametrize(
    ("port", "right", "wrong", "mistake"),
    [*broken(NUMPY, [], BROKEN_NUMPY), *broken(JAVASCRIPT, [needs_node], BROKEN_JAVASCRIPT)],
)
def test_a_broken_line_is_found_at_its_stage_with_its_reason(port, right, wrong, mistake, tmp_path):
    source = port.read_text(encoding="utf-8")
    assert source.count(right) == 1
    copy = tmp_path / port.name
    copy.write_text(source.replace(right, wrong), encoding="utf-8")
    [stage] = [one["stage"] for one in ABOUT["mistakes"] if one["name"] == mistake]

    run(copy, tmp_path / "port", has_own_pixels=stage in ("grid", "pixels"))
    status, said = compared(tmp_path / "port")
    assert status == 1
    assert said["first"] == stage
    [reason] = said["reasons"]
    assert reason["known"]
    assert reason["words"] == WORDS[mistake]
