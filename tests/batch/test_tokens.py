"""Tokens that take cells of a grid, and the transpose.

That sums do not drift, and that each token counts for its cell, contract/ compares with timm.
"""

import pytest
import torch

from timm_naflex_fast.batch.plan import Plan, Run
from timm_naflex_fast.batch.tokens import add_to_tokens, assemble, sum_over_tokens
from timm_naflex_fast.resampling.spec import Resampling, ResizeSpec

SIZE = 2, 2
BATCH = slice(0, 2)
RUNS = {
    "all cells": [Run(BATCH, slice(0, 4), 4)],
    "the first cells": [Run(BATCH, slice(1, 3), 2)],
    "padding": [Run(BATCH, slice(0, 4), 4), Run(BATCH, slice(4, 6), 1)],
    "any order": [Run(slice(1, 2), slice(1, 5), torch.tensor([0, 2, 1, 3]))],
}


@pytest.mark.parametrize("name", RUNS)
def test_a_sum_is_the_transpose_of_what_is_added(name):
    runs = RUNS[name]
    cells = torch.arange(1.0, 5.0)[:, None]
    added = torch.zeros(2, 6, 1)
    add_to_tokens(added, runs, cells)
    g = torch.arange(12.0).view(2, 6, 1) ** 2

    plan = Plan({SIZE: runs}, Resampling(ResizeSpec(), torch.float32))
    table = cells.clone().requires_grad_()
    assembled = assemble(added.shape, plan, [(SIZE, table)])
    assert added.any()
    assert torch.equal(assembled, added)
    (of_cells,) = torch.autograd.grad(assembled, table, g)
    assert torch.equal(sum_over_tokens(g, runs, SIZE, torch.float32), of_cells)
