"""Resize matrices are what ``F.interpolate`` computes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from timm_naflex_fast.functional import resize_matrix
from timm_naflex_fast.resampling.matrices import (
    axis_matrix,
    axis_taps,
    interpolate,
)
from timm_naflex_fast.resampling.spec import FLAG, LOOP, OLDER_FLAG, ResizeSpec

sizes = st.integers(1, 48)
modes = st.sampled_from(["bilinear", "bicubic"])
references = st.sampled_from([LOOP, FLAG, OLDER_FLAG])


@given(sizes, sizes, modes | st.just("linear"), st.booleans(), st.booleans())
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


@given(sizes, sizes, modes, st.booleans(), st.booleans(), references, st.booleans())
def test_taps_hold_the_whole_matrix_and_each_cell_that_is_read(
    n, n0, mode, antialias, align_corners, reference, transpose
):
    longest = n + 2
    antialias = antialias and reference == LOOP
    spec = ResizeSpec(mode, antialias, align_corners, False, reference, (longest, longest))
    matrix = axis_matrix(1, (n, n), n0, spec)
    matrix = matrix.t() if transpose else matrix

    taps = axis_taps(n, n, n0, spec, longest, torch.float32, transpose)
    rows = torch.from_numpy(taps.rows)
    columns = torch.from_numpy(taps.columns)

    found = torch.zeros(matrix.shape)
    found[rows, columns] = torch.from_numpy(taps.weights)
    assert torch.equal(found, matrix)
    assert len(set(zip(taps.rows, taps.columns))) == len(rows)  # each cell once


@pytest.mark.parametrize("size", [(7, 1), (3, 1), (2, 3)], ids=str)
@given(
    st.sampled_from([(1, 5, 4, 8), (5, 4, 8), (1, 5, 1, 8), (1, 1, 4, 8), (5, 1, 2)]),
    st.integers(0, 200),
    modes,
)
def test_axes_of_length_1_may_have_any_stride(size, shape, stride, mode):
    table = torch.randn(shape)
    # NumPy's new axes have stride 0.
    strides = [stride if n == 1 else usual for n, usual in zip(shape, table.stride(), strict=True)]
    a_h = resize_matrix(size[0], shape[-3], mode)
    a_w = resize_matrix(size[1], shape[-2], mode)
    want = torch.einsum("ah,hwc,bw->abc", a_h, table.view(shape[-3:]), a_w)[None]

    got = interpolate(table.as_strided(shape, strides), size, ResizeSpec(mode))

    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
