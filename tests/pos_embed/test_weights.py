"""Resize matrices are what ``F.interpolate`` computes."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from timm_naflex_fast.functional import resize_matrix

sizes = st.integers(1, 48)
modes = st.sampled_from(["bilinear", "bicubic", "linear"])


@given(sizes, sizes, modes, st.booleans(), st.booleans())
def test_matrix_resizes_as_interpolate_does(n, n0, mode, antialias, align_corners):
    # Width 5: F.interpolate(antialias=True) errs at width 1.
    signal = torch.randn(n0, 5, dtype=torch.float64)
    if mode == "linear":
        lines = signal.t()[None]
        want = F.interpolate(lines, size=n, mode=mode, align_corners=align_corners)[0].t()
    else:
        how = dict(mode=mode, antialias=antialias, align_corners=align_corners)
        want = F.interpolate(signal[None, None], size=(n, 5), **how)[0, 0]

    matrix = resize_matrix(n, n0, mode, antialias, align_corners, torch.float64)

    torch.testing.assert_close(matrix @ signal, want, atol=1e-12, rtol=0)
    torch.testing.assert_close(matrix.sum(1), torch.ones(n, dtype=torch.float64))
