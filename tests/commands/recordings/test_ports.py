"""The two ports in examples/ agree with the original; where a line of one is broken, ``compare``
says at which stage it shows, and why."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from timm_naflex_fast.commands.recordings.compare import compare_folders

ROOT = Path(__file__).parents[3]
KIT = ROOT / "recordings" / "siglip2_naflex_tiny"
WEIGHTS = KIT / "weights" / "transformers.safetensors"
NUMPY = ROOT / "examples" / "port_in_numpy.py"
JAVASCRIPT = ROOT / "examples" / "port_in_javascript" / "port.mjs"

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


@needs_node
def test_a_broken_line_is_found_at_its_stage_with_its_reason(tmp_path):
    """``test_mistakes.py`` asks every mistake of the port in NumPy."""
    source = JAVASCRIPT.read_text(encoding="utf-8")
    copy = tmp_path / JAVASCRIPT.name
    copy.write_text(source.replace("const EPS = 1e-6", "const EPS = 1e-5"), encoding="utf-8")
    run(copy, tmp_path / "port")
    found = compare_folders(KIT, tmp_path / "port")
    assert found.first.stage == "block_0"
    assert found.reason.words == "LayerNorm's eps is 1e-5, not 1e-6"
