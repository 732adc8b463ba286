"""What a GPU will be asked one day, rehearsed on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from interpreter import HAS_TRITON, TOO_NEW_NUMPY


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="the rehearsal is for a CPU without a GPU")
@pytest.mark.skipif(TOO_NEW_NUMPY, reason="the interpreter of this Triton needs numpy < 2.4")
def test_what_a_gpu_is_asked_is_rehearsed(tmp_path):
    """The parts that a CPU can run give figures; nothing ends in an error, and at most eight files are written."""
    script = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
    command = [sys.executable, str(script), "--out", str(tmp_path), "--quick", "--device", "cpu"]
    subprocess.run(command, check=True, timeout=1800)
    found = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert len(list(tmp_path.iterdir())) == 8
    assert {part: record["error"] for part, record in found.items() if "error" in record} == {}
    assert found["tests"]["passed"] and found["kernels"]["siglip"].startswith("every kernel ran")
    assert {row["contender"] for row in found["step"]["rows"]} >= {"stock", "matmul", "plain-add"}
