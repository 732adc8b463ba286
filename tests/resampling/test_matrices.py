"""Resize matrices are what ``F.interpolate`` computes."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from timm_naflex_fast.functional import resize_matrix
from timm_naflex_fast.resampling.matrices import (
    ResizeSpec,
    axis_matrix,
    axis_taps,
    cell_positions,
    interpolate,
)

sizes, modes = st.integers(1, 48), st.sampled_from(["bilinear", "bicubic"])


@given(sizes, sizes, modes | st.just("linear"), st.booleans(), st.booleans())
def test_matrix_resizes_as_interpolate_does(n, n0, mode, antialias, align_corners):
    signal = torch.randn(
        n0, 5, dtype=torch.float64
    )  # width 5: F.interpolate(antialias=True) errs at width 1
    matrix = resize_matrix(n, n0, mode, antialias, align_corners, torch.float64)
    if mode == "linear":
        want = F.interpolate(signal.t()[None], size=n, mode=mode, align_corners=align_corners)[
            0
        ].t()
    else:
        keep = dict(mode=mode, antialias=antialias, align_corners=align_corners)
        want = F.interpolate(signal[None, None], size=(n, 5), **keep)[0, 0]
    torch.testing.assert_close(matrix @ signal, want, atol=1e-12, rtol=0)
    torch.testing.assert_close(matrix.sum(1), torch.ones(n, dtype=torch.float64))


@given(
    sizes,
    sizes,
    modes,
    *3 * [st.booleans()],
    st.sampled_from(["interpolate", "grid_sample", "affine_grid"]),
)
def test_taps_hold_the_whole_matrix_and_each_cell_that_is_read(
    n, n0, mode, antialias, align_corners, transpose, way
):
    spec = ResizeSpec(mode, antialias, align_corners, False, way, (n + 2, n + 2))
    matrix = axis_matrix(1, (n, n), n0, spec)
    assert torch.equal(
        axis_matrix(1, (n, n), n0, spec, torch.bfloat16), matrix.bfloat16()
    )  # one cast
    *parts, reads = axis_taps(n, n, n0, spec, n + 2, torch.float32, transpose)
    assert axis_taps(n, n, n0, spec, n + 2, torch.float64, transpose).weights.dtype == "float64"
    columns, weights, real = map(torch.from_numpy, parts)
    matrix = matrix.t() if transpose else matrix
    assert torch.equal(torch.zeros_like(matrix).scatter_add_(1, columns.long(), weights), matrix)
    read = (
        torch.zeros(matrix.shape).scatter_add_(1, columns.long(), real.float()) == 1
    )  # each cell once
    assert read[matrix != 0].all() and read.sum() == real.sum() == reads


@given(
    st.sampled_from([(1, 5, 4, 8), (5, 4, 8), (1, 5, 1, 8), (1, 1, 4, 8), (5, 1, 1)]),
    st.integers(0, 200),
    modes,
)
def test_axes_of_length_1_may_have_any_stride(shape, stride, mode):
    assert [cell_positions(n, True).tolist() for n in (1, 2, 3)] == [[-1], [-1, 1], [-1, 0, 1]]
    table = torch.randn(shape)
    strides = [
        stride if n == 1 else usual for n, usual in zip(shape, table.stride())
    ]  # NumPy's new axes have 0
    spec = ResizeSpec(mode)
    for size in ((7, 1), (3, 1), (2, 3)):
        a_h, a_w = (resize_matrix(n, n0, mode, True) for n, n0 in zip(size, shape[-3:]))
        want = torch.einsum("ah,hwc,bw->abc", a_h, table.view(shape[-3:]), a_w)[None]
        found = interpolate(table.as_strided(shape, strides), size, spec)
        torch.testing.assert_close(found, want, atol=1e-5, rtol=0)
