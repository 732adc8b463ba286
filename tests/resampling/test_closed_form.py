"""Closed-form resize weights against PyTorch's own, read off F.interpolate."""

import itertools

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from timm_naflex_fast.resampling.closed_form import axis_weights
from timm_naflex_fast.resampling.matrices import ResizeSpec, axis_matrix

sizes = st.integers(1, 48) | st.sampled_from([63, 128, 190, 288])
HOW = [
    *itertools.product(["bilinear", "bicubic"], [True, False], [True, False]),
    ("linear", False, False),
]


@given(sizes, sizes, st.sampled_from(HOW))
@example(41, 288, HOW[-1])  # where it counts that PyTorch rounds twice
def test_rows_are_those_of_the_resize_matrix(n, n0, spec):
    mode, antialias, _ = spec
    if (
        mode == "bilinear" and not antialias
    ):  # longer, PyTorch resizes the one-channel basis by yet another kernel
        n = min(n, 124)
    want = axis_matrix(0, (n, n), n0, ResizeSpec(*spec))
    got = axis_weights(torch.arange(n).double(), torch.tensor([n]).double(), n0, ResizeSpec(*spec))
    exact = axis_matrix(0, (n, n), n0, ResizeSpec(*spec), torch.float64)
    # The builds of torch 2.11 and 2.14 round the position in 1-D once instead of twice; those of
    # 2.4 and 2.15 do not.
    allowed = (
        n0 * 2**-24 if mode == "linear" and torch.__version__.startswith(("2.11.", "2.14.")) else 0
    )
    assert (got - want).abs().max() <= max(allowed, 1e-6)
    assert (got - exact).abs().max() <= 1.5 * (want - exact).abs().max() + 2e-7
    torch.testing.assert_close(got.sum(1), torch.ones(n, dtype=torch.float64), atol=1e-12, rtol=0)
