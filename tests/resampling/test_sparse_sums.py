"""Resize matrices as weighted sums of rows, against the dense matrices they stand for."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_matrices import cell_weights

from timm_naflex_fast.resampling.bags import AtOnce, AxisByAxis, at_once, steps
from timm_naflex_fast.resampling.matrices import Resampling, axis_matrices

CPU = torch.device("cpu")
sizes = st.integers(1, 24)


def apply(way, rows, h, table_size, adjoint):
    """The result of either way on cells (R, C)."""
    if isinstance(way, AtOnce):
        out = way.cells.of(rows)
        if way.touched is None:
            return out
        return rows.new_zeros(table_size[0] * table_size[1], rows.shape[1]).index_add_(0, way.touched, out)
    channels = rows.shape[1]
    if adjoint:
        strip = way.x.of(rows)
        return way.y.of(strip.view(h, -1)).view(-1, channels)
    strip = way.y.of(rows.view(table_size[0], -1))
    return way.x.of(strip.view(-1, channels))


@settings(max_examples=300)
@given(
    sizes,
    sizes,
    sizes,
    sizes,
    st.builds(Resampling, st.sampled_from(["bilinear", "bicubic"]), st.booleans(), st.booleans(), st.booleans()),
    st.booleans(),
)
def test_bags_are_the_matrices_and_their_transposes(h, w, rows, cols, how, adjoint):
    way = steps(h, w, (rows, cols), how, adjoint, torch.float32, CPU)
    if (h, w) == (rows, cols):
        assert way is None
        return
    a_h, a_w = (a.double() for a in axis_matrices(h, w, (rows, cols), how, torch.float32, CPU))
    dense = torch.kron(a_h, a_w)
    matrix = dense.t() if adjoint else dense
    values = torch.randn(matrix.shape[1], 3, dtype=torch.float64)
    got = apply(way, values, h, (rows, cols), adjoint)
    torch.testing.assert_close(got, matrix @ values, atol=1e-6 * values.abs().max(), rtol=0)


def test_bags_read_only_what_counts():
    how = Resampling("bilinear", antialias=False, align_corners=True, ar_preserving=True)
    way = steps(5, 9, (40, 33), how, False, torch.float32, CPU)
    dense = cell_weights(5, 9, (40, 33), how)
    assert isinstance(way, AtOnce) and len(way.cells.index) == (dense != 0).sum()


def test_a_radio_grid_leaves_most_of_the_table_alone():
    how = Resampling("bilinear", antialias=False, align_corners=True, ar_preserving=True)
    way = steps(16, 20, (128, 128), how, True, torch.float32, CPU)
    assert isinstance(way, AtOnce) and len(way.touched) <= 4 * 16 * 20


@pytest.mark.parametrize(
    "mode,table,grid,kind",
    [
        ("bilinear", (16, 16), (16, 15), AtOnce),
        ("bilinear", (16, 16), (9, 27), AtOnce),
        ("bicubic", (16, 16), (24, 24), AxisByAxis),
        ("bicubic", (32, 32), (17, 18), AxisByAxis),
        ("bicubic", (32, 32), (2, 2), AxisByAxis),
        ("bilinear", (16, 16), (2, 24), AxisByAxis),
        ("bicubic", (4, 4), (5, 5), AtOnce),
    ],
)
def test_the_choice_follows_the_reads(mode, table, grid, kind):
    assert isinstance(steps(*grid, table, Resampling(mode), False, torch.float32, CPU), kind)
    a_h, a_w = axis_matrices(*grid, table, Resampling(mode), torch.float32, CPU)
    assert at_once(int((a_h != 0).sum()), int((a_w != 0).sum()), grid, table[1]) is (kind is AtOnce)
