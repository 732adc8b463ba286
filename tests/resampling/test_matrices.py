"""Resize matrices are what ``F.interpolate`` computes."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tests.support.checks import one_by_one
from timm_naflex_fast.functional import resample_pos_embed, resize_matrix
from timm_naflex_fast.resampling.matrices import ResizeSpec, affine_positions, axis_matrix, cell_positions, taps

sizes = st.integers(1, 48)
modes = st.sampled_from(["bilinear", "bicubic"])


@given(sizes, sizes, modes, st.booleans(), st.booleans())
def test_matrix_resizes_as_interpolate_does(n, n0, mode, antialias, align_corners):
    signal = torch.randn(1, 1, n0, 5, dtype=torch.float64)  # width 5: F.interpolate(antialias=True) errs at width 1
    matrix = resize_matrix(n, n0, mode, antialias, align_corners, torch.float64)
    want = F.interpolate(signal, size=(n, 5), mode=mode, antialias=antialias, align_corners=align_corners)[0, 0]
    torch.testing.assert_close(matrix @ signal[0, 0], want, atol=1e-12, rtol=0)
    torch.testing.assert_close(matrix.sum(1), torch.ones(n, dtype=torch.float64))


@given(sizes, sizes, st.booleans())
def test_linear_matrix_resizes_as_interpolate_does(n, n0, align_corners):
    signal = torch.randn(1, 3, n0, dtype=torch.float64)
    want = F.interpolate(signal, size=n, mode="linear", align_corners=align_corners)[0].t()
    matrix = resize_matrix(n, n0, "linear", align_corners=align_corners, dtype=torch.float64)
    torch.testing.assert_close(matrix @ signal[0].t(), want)


@given(sizes, sizes, modes, st.booleans())
def test_taps_hold_the_whole_matrix(n, n0, mode, antialias):
    matrix = resize_matrix(n, n0, mode, antialias)
    index, weight = taps(matrix)
    assert torch.equal(torch.zeros_like(matrix).scatter_add_(1, index, weight), matrix)
    assert index.shape[1] == max(1, (matrix != 0).sum(1).max())


def test_keys_coefficient_is_half_with_antialias_and_three_quarters_without():
    # Doubling samples the cubic kernel at 0.25, 0.75, 1.25 and 1.75 from the table's cells.
    def keys(t, a):
        return (a + 2) * t**3 - (a + 3) * t**2 + 1 if t <= 1 else a * (t**3 - 5 * t**2 + 8 * t - 4)

    for antialias, a in ((True, -0.5), (False, -0.75)):
        row = resize_matrix(32, 16, "bicubic", antialias, dtype=torch.float64)[16]
        want = torch.tensor([keys(t, a) for t in (1.75, 0.75, 0.25, 1.25)], dtype=torch.float64)
        got = row[row != 0]
        torch.testing.assert_close(got.sort().values, want.sort().values)


def test_a_matrix_in_half_precision_is_one_cast():
    assert torch.equal(resize_matrix(3, 5, dtype=torch.bfloat16), resize_matrix(3, 5).bfloat16())


def test_unknown_mode_names_the_valid_ones():
    with pytest.raises(ValueError, match="'bilinear', 'bicubic'"):
        resize_matrix(3, 4, "nearest")


@given(
    sizes, sizes, st.tuples(st.integers(1, 20), st.integers(1, 20)), modes, st.booleans(), st.booleans(), st.booleans()
)
def test_resample_pos_embed_is_interpolate(h, w, table_size, mode, antialias, align_corners, ar_preserving):
    table = torch.randn(*table_size, 3, dtype=torch.float64)
    how = dict(mode=mode, antialias=antialias, align_corners=align_corners, ar_preserving=ar_preserving)
    (want,) = one_by_one(table, [(h, w)], **how)
    torch.testing.assert_close(resample_pos_embed(table, (h, w), **how), want.view(h, w, 3), atol=1e-12, rtol=0)


@given(sizes, sizes)
def test_older_and_newer_timm_sample_at_the_same_positions(n, more):
    want = ((2 * torch.arange(n) + 1) / n - 1).float()
    torch.testing.assert_close(cell_positions(n, align_corners=False), want, atol=1e-6, rtol=0)
    torch.testing.assert_close(affine_positions(n, n + more), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sampler", ["interpolate", "grid_sample", "affine_grid"])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "linear"])
def test_matrices_are_float32_on_the_cpu_whatever_the_defaults_are(sampler, mode):
    spec = ResizeSpec(mode, False, False, False, sampler, (9, 9))
    want = axis_matrix(0, 5, 7, 6, spec)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            got = axis_matrix(0, 5, 7, 6, spec)
    finally:
        torch.set_default_dtype(torch.float32)
    assert got.dtype is want.dtype is torch.float32 and got.device.type == "cpu" and torch.equal(got, want)
