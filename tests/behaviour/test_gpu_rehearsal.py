"""What a GPU will be asked one day, rehearsed on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.interpreter import HAS_TRITON

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the rehearsal is for a CPU without a GPU"),
]


def rehearse(out, *parts):
    command = [sys.executable, str(SCRIPT), *parts, "--out", str(out), "--device", "cpu"]
    code = subprocess.run(command, timeout=1800, stdout=subprocess.DEVNULL).returncode
    lines = [json.loads(line) for line in (out / "day.jsonl").read_text().splitlines()]
    return code, lines, {line["part"]: line["ended"] for line in lines if "ended" in line}


def test_what_a_gpu_is_asked_is_rehearsed(tmp_path):
    """Every part of both commands runs, and finds nothing wrong."""
    code, lines, ended = rehearse(tmp_path, "first", "second")
    assert [line for line in lines if not line.get("ok", True)] == [] and code == 0
    names = "machine correct waits graphs compiled sanitize times kernels model inductor stock tests"
    assert ended == dict.fromkeys(names.split(), 0)
    assert next(line for line in lines if line["part"] == "correct")["gradient"] <= 1e-5
    assert " 1 passed" in (tmp_path / "day.log").read_text()  # of tests
    rows = json.loads((tmp_path / "step.json").read_text())["rows"]
    assert {row["contender"] for row in rows} >= {"stock", "matmul", "plain-add"}


def test_a_part_that_hangs_or_crashes_costs_only_itself(tmp_path):
    code, lines, ended = rehearse(tmp_path, "hang", "crash", "machine")
    assert code == 1 and ended == {"hang": "stopped after 20 s", "crash": -11, "machine": 0}
    found = {line["case"]: line for line in lines if "case" in line}
    assert {"child", "before", "copy"} <= set(found)  # what they had found by then is there
    with pytest.raises(ProcessLookupError):
        os.kill(found["child"]["pid"], 0)
