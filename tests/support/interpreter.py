"""Whether Triton, and its interpreter on the CPU, can run here."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.oracles import Case
from timm_naflex_fast.backends import triton


def _release(name: str) -> tuple[int, ...]:
    return tuple(map(int, version(name).split(".")[:2]))


HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton 3.6's interpreter turns arrays of one element into integers, which NumPy 2.4 refuses; 3.7 does not.
TOO_NEW_NUMPY = HAS_TRITON and _release("triton") < (3, 7) and _release("numpy") >= (2, 4)
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
RUNS = HAS_TRITON and (INTERPRETED or DEVICE == "cuda")
runs = pytest.mark.skipif(not RUNS, reason="no GPU: test_by_the_interpreter runs it")


def run_interpreted(file: str, which: str) -> None:
    """Run tests of a file in a process of its own: Triton decides at import whether it interprets."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-k", which, file]
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr


if INTERPRETED and HAS_TRITON:
    # Few strips and lengths: the interpreter takes its programs one after another. Heights above 16 go by tokens.
    import triton.language as tl

    from timm_naflex_fast.backends import triton_kernels

    triton_kernels.STRIPS = tl.constexpr(16)
    triton.LENGTHS = (96, 2048, 4095)


def add(case: Case, embeds: Any, x: Tensor, coord: Tensor) -> Tensor:
    """The kernels without their trial, on the GPU or by the interpreter; the coordinates lie apart in memory."""
    if x.dtype is torch.float64:
        pytest.skip("the kernels take single and half precision")
    there, table, spec = x.to(DEVICE), embeds.pos_embed.to(DEVICE), case.spec
    if case.use_grid_sample:
        spec = replace(spec, sampler="grid_sample")
    for kind in ("in place", "gradient"):
        triton._agreed[there.device, x.dtype, table.shape[-3:], spec, kind] = True
    triton.add(there, (table,), coord.to(DEVICE).repeat(1, 1, 2)[..., :2], spec)
    return x if there is x else x.copy_(there)
