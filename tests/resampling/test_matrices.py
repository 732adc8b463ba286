"""Resize matrices are what ``F.interpolate`` computes."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from timm_naflex_fast.functional import resize_matrix
from timm_naflex_fast.resampling.matrices import ResizeSpec, axis_taps

sizes, modes = st.integers(1, 48), st.sampled_from(["bilinear", "bicubic"])


@given(sizes, sizes, modes | st.just("linear"), st.booleans(), st.booleans())
def test_matrix_resizes_as_interpolate_does(n, n0, mode, antialias, align_corners):
    signal = torch.randn(n0, 5, dtype=torch.float64)  # width 5: F.interpolate(antialias=True) errs at width 1
    matrix = resize_matrix(n, n0, mode, antialias, align_corners, torch.float64)
    if mode == "linear":
        want = F.interpolate(signal.t()[None], size=n, mode=mode, align_corners=align_corners)[0].t()
    else:
        keep = dict(mode=mode, antialias=antialias, align_corners=align_corners)
        want = F.interpolate(signal[None, None], size=(n, 5), **keep)[0, 0]
    torch.testing.assert_close(matrix @ signal, want, atol=1e-12, rtol=0)
    torch.testing.assert_close(matrix.sum(1), torch.ones(n, dtype=torch.float64))


@given(sizes, sizes, modes, st.booleans(), st.booleans(), st.booleans())
def test_taps_hold_the_whole_matrix_and_every_cell_that_is_read(n, n0, mode, antialias, align_corners, transpose):
    matrix = resize_matrix(n, n0, mode, antialias, align_corners)
    spec = ResizeSpec(mode, antialias, align_corners)
    *parts, reads = axis_taps(n, n, n0, spec, 0, torch.float32, transpose)
    columns, weights, real = map(torch.from_numpy, parts)
    matrix = matrix.t() if transpose else matrix
    assert torch.equal(torch.zeros_like(matrix).scatter_add_(1, columns.long(), weights), matrix)
    read = torch.zeros(matrix.shape).scatter_add_(1, columns.long(), real.float()) == 1  # each cell once
    assert read[matrix != 0].all() and read.sum() == real.sum() == reads


def test_a_matrix_in_half_precision_is_one_cast():
    assert torch.equal(resize_matrix(3, 5, dtype=torch.bfloat16), resize_matrix(3, 5).bfloat16())
