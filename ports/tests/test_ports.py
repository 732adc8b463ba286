"""The ports in NumPy and in JavaScript agree with the original."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vit_ports.compare import compare_folders

ROOT = Path(__file__).parents[1]
KIT = ROOT / "kit"
WEIGHTS = KIT / "weights" / "transformers.safetensors"
NUMPY = ROOT / "vit_ports" / "towers" / "siglip2" / "port_in_numpy.py"
JAVASCRIPT = ROOT / "examples" / "port_in_javascript" / "port.mjs"

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
# What is called before the kit, the port's folder and the weights; and what it does not write.
PORTS = [
    ([sys.executable, NUMPY, "--weights", WEIGHTS], []),
    ([sys.executable, NUMPY, "--weights", WEIGHTS, "--pixels"], ["grid", "pixels"]),
    pytest.param(["node", JAVASCRIPT], ["grid", "pixels"], marks=needs_node),
]


@pytest.mark.parametrize(("command", "not_written"), PORTS)
def test_a_port_is_right_at_every_stage(command, not_written, tmp_path):
    given = [*command, KIT, tmp_path]
    if JAVASCRIPT in given:
        given.append(WEIGHTS)
    done = subprocess.run(given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = compare_folders(KIT, tmp_path)
    assert (found.first, found.missing, found.not_written) == (None, [], not_written)
    pixels = [row.share for row in found.rows if row.stage == "pixels"]
    assert max(pixels, default=0) <= 1  # grey level
