"""Whether Triton's kernels can run here: on a GPU, or in its interpreter on the CPU (``test_by_the_interpreter``)."""

import os
from dataclasses import replace

import pytest
import torch

from timm_naflex_fast.backends import triton

HAS_TRITON = triton.HAS_TRITON
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
RUNS = HAS_TRITON and (INTERPRETED or DEVICE == "cuda")
runs = pytest.mark.skipif(not RUNS, reason="no GPU: test_by_the_interpreter runs it")


if INTERPRETED and HAS_TRITON:
    # Few strips and lengths: the interpreter takes its programs one after another. Heights above 16 go by tokens.
    import triton.language as tl

    from timm_naflex_fast.backends import triton_kernels

    triton_kernels.STRIPS = tl.constexpr(16)
    triton.LENGTHS = (96, 2048, 4095)


def add(case, embeds, x, coord):
    """The kernels without their trial, on the GPU or by the interpreter; the coordinates lie apart in memory."""
    if x.dtype is torch.float64:
        pytest.skip("the kernels take single and half precision")
    there, table = x.to(DEVICE), embeds.pos_embed.to(DEVICE)
    spec = replace(case.spec, sampler="grid_sample" if case.use_grid_sample else "interpolate")
    for kind in ("in place", "gradient"):
        triton._agreed[there.device, x.dtype, table.shape[-3:], spec, kind] = True
    triton.add(there, (table,), coord.to(DEVICE).repeat(1, 1, 2)[..., :2], spec)
    return x if there is x else x.copy_(there)
