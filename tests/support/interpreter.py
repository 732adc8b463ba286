"""Whether Triton, and its interpreter on the CPU, can run here."""

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch


def _release(name: str) -> tuple[int, ...]:
    return tuple(map(int, version(name).split(".")[:2]))


HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton 3.6's interpreter turns arrays of one element into integers, which NumPy 2.4 refuses; 3.7 does not.
TOO_NEW_NUMPY = HAS_TRITON and _release("triton") < (3, 7) and _release("numpy") >= (2, 4)
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
runs = pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="no GPU: test_by_the_interpreter runs it")


def run_interpreted(file: str, which: str) -> None:
    """Run tests of a file in a process of its own: Triton decides at import whether it interprets."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", which, file]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Few strips and lengths: the interpreter takes its programs one after another. Heights above 16 go by tokens."""
    if DEVICE == "cpu":
        import triton.language as tl

        from timm_naflex_fast.backends import triton as matmul_triton
        from timm_naflex_fast.backends import triton_kernels

        monkeypatch.setattr(triton_kernels, "STRIPS", tl.constexpr(16))
        monkeypatch.setattr(matmul_triton, "LENGTHS", (96, 2048, 4095))
