"""The sparse sums and their transposes are each other's derivatives, whatever the table is."""

from itertools import product

import pytest
import torch

from tests.support.oracles import row_major
from timm_naflex_fast.backends import eager
from timm_naflex_fast.resampling.grids import ResamplePlan, group_grids
from timm_naflex_fast.resampling.matrices import ResizeSpec
from timm_naflex_fast.strategies import STRATEGIES


@pytest.mark.parametrize("ar_preserving", [True, False])
@pytest.mark.parametrize(("mode", "antialias"), [*product(("bilinear", "bicubic"), (True, False)), ("linear", False)])
@pytest.mark.parametrize("size", [(6, 5), (40, 33)], ids=["dense", "taps"])
def test_gradcheck(mode, antialias, ar_preserving, size):
    shapes = [(1, *size, 2)] if mode != "linear" else [(n, 2) for n in size]
    tables = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    coord = row_major([(3, 4), (7, 2), (3, 4)])
    coord[1] = coord[1].flip(0)  # and one sample whose tokens are reordered
    x = torch.randn(3, coord.shape[1], 2, dtype=torch.float64, requires_grad=True)
    grouped = group_grids(coord, x)

    def add(x, *tables):
        out = x * 1
        spec = ResizeSpec(mode, antialias, ar_preserving=ar_preserving)
        plan = ResamplePlan(*grouped, spec, out.dtype, torch.float64)
        eager.add_planned(out, tables, plan, STRATEGIES["matmul"])
        return out

    assert torch.autograd.gradcheck(add, (x, *tables), fast_mode=size != (6, 5))
