"""The sparse sums of a resize plan against the dense matrices that they replace."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import cell_weights

from timm_naflex_fast.resampling.grids import Group
from timm_naflex_fast.resampling.matrices import ResizeSpec, axis_matrix, reference
from timm_naflex_fast.resampling.sparse_resize import both_axes_together, resample, resize_plan

sizes = st.integers(1, 24)


def plan_of(h, w, table_size, how, adjoint=False):
    return resize_plan(h, w, table_size, how, adjoint, torch.float32, torch.device("cpu"))


def apply(plan, cells, h, table_size, adjoint):
    """The plan's sums one after the other, on cells (R, C)."""
    channels = cells.shape[1]
    if len(plan) == 1:
        out = plan[0](cells)
        if plan[0].rows is None:
            return out
        return cells.new_zeros(table_size[0] * table_size[1], channels).index_add_(0, plan[0].rows, out)
    if adjoint:
        return plan[1](plan[0](cells).view(h, -1)).view(-1, channels)
    return plan[1](plan[0](cells.view(table_size[0], -1)).view(-1, channels))


@given(
    sizes,
    sizes,
    sizes,
    sizes,
    st.builds(ResizeSpec, st.sampled_from(["bilinear", "bicubic"]), st.booleans(), st.booleans(), st.booleans()),
    st.booleans(),
    st.booleans(),
)
def test_plans_are_the_matrices_and_their_transposes(h, w, rows, cols, how, adjoint, sampled):
    if sampled:
        how = ResizeSpec(how.mode, False, how.align_corners, how.ar_preserving, "grid_sample")
    plan = plan_of(h, w, (rows, cols), how, adjoint)
    if (h, w) == (rows, cols) and not sampled:
        assert plan == ()
        return
    dense = cell_weights(h, w, (rows, cols), how).double()
    matrix = dense.t() if adjoint else dense
    values = torch.randn(matrix.shape[1], 3, dtype=torch.float64)
    got = apply(plan, values, h, (rows, cols), adjoint)
    torch.testing.assert_close(got, matrix @ values, atol=1e-6 * values.abs().max(), rtol=0)


def test_a_plan_reads_only_what_is_not_zero():
    how = ResizeSpec("bilinear", antialias=False, align_corners=True, ar_preserving=True)
    (sums,) = plan_of(5, 9, (40, 33), how)
    assert len(sums.reads) == (cell_weights(5, 9, (40, 33), how) != 0).sum()
    assert sums.reads.dtype is sums.offsets.dtype is torch.int32 and sums.weights.dtype is torch.float32


def test_a_radio_grid_leaves_most_of_the_table_alone():
    how = ResizeSpec("bilinear", antialias=False, align_corners=True, ar_preserving=True)
    (sums,) = plan_of(16, 20, (128, 128), how, True)
    assert len(sums.rows) <= 4 * 16 * 20


@pytest.mark.parametrize(
    "mode,table,grid,steps",
    [
        ("bilinear", (16, 16), (16, 15), 1),
        ("bilinear", (16, 16), (9, 27), 1),
        ("bicubic", (16, 16), (24, 24), 2),
        ("bicubic", (32, 32), (17, 18), 2),
        ("bicubic", (32, 32), (2, 2), 2),
        ("bilinear", (16, 16), (2, 24), 2),
        ("bicubic", (4, 4), (5, 5), 1),
    ],
)
def test_the_choice_follows_the_reads(mode, table, grid, steps):
    assert len(plan_of(*grid, table, ResizeSpec(mode))) == steps
    a_h, a_w = (axis_matrix(axis, *grid, table[axis], ResizeSpec(mode)) for axis in (0, 1))
    assert both_axes_together(int((a_h != 0).sum()), int((a_w != 0).sum()), grid, table[1]) is (steps == 1)


def test_never_more_than_sixteen_taps_at_once():
    assert both_axes_together(4, 4, (1, 1), 10) and not both_axes_together(5, 4, (1, 1), 10)


def test_grids_of_one_height_share_the_sum_along_y(monkeypatch):
    summed, bag = [], torch.embedding_bag
    monkeypatch.setattr(torch, "embedding_bag", lambda *args: summed.append(1) or bag(*args))
    table, how = torch.randn(32, 32, 4), ResizeSpec("bicubic")
    groups = [Group(17, w, [i], 17 * w) for i, w in enumerate((18, 20, 25))]
    assert [len(plan_of(group.h, group.w, (32, 32), how)) for group in groups] == [2, 2, 2]
    for group, cells in resample(table, groups, how, torch.float32):
        torch.testing.assert_close(cells.view(17, group.w, 4), reference(table, (17, group.w), how), atol=5e-6, rtol=0)
    assert len(summed) == 1 + 3
