"""Sums of token gradients.

That they do not drift, and that each token counts for its cell, contract/ compares with timm.
"""

import pytest
import torch

from tests.support.oracles import row_major
from timm_naflex_fast.batch.layout import Coordinates
from timm_naflex_fast.batch.plan import Group
from timm_naflex_fast.batch.tokens import Tokens
from timm_naflex_fast.functional import add_factorized_pos_embed_
from timm_naflex_fast.resampling.spec import ResizeSpec

ODD = 1 + 2**-7  # a number of bfloat16; its sums are none


def test_padding_in_half_precision_is_summed_in_float32():
    coord = row_major([(1, 1)], length=1002)
    x = torch.ones(1, 1002, 2, dtype=torch.bfloat16)
    plan = Coordinates(coord).plan(x, ResizeSpec(reference="grid_sample"))
    total = Tokens(x, plan.counts).sum(plan.groups[1, 1], torch.float32)
    # 1002, and the padding's 1001, are no numbers of bfloat16.
    assert total.tolist() == [[1002.0, 1002.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("others", [0, 1])  # whether the group is the whole batch
def test_samples_in_half_precision_are_summed_in_float32(dtype, others):
    x = torch.full((34 + others, 1, 1), ODD, dtype=dtype)
    group = Group(1, 1, list(range(34)))
    with torch.device("meta"):  # a default device changes nothing
        total = Tokens(x, [(1, 0)] * len(x)).sum(group, torch.float32)
    assert total.item() == 34 * ODD


def test_gradients_of_factorized_tables_are_summed_in_float32():
    x = torch.zeros(34, 1, 1, dtype=torch.bfloat16)
    line = torch.zeros(1, 1, requires_grad=True)
    out = add_factorized_pos_embed_(x, line, line, torch.zeros(34, 1, 2))
    (grad,) = torch.autograd.grad(out, line, torch.full_like(x, ODD))
    assert grad.item() == 2 * 34 * ODD


def test_an_order_of_cells_is_undone_in_the_sum():
    order = torch.tensor([0, 2, 1, 3])
    group = Group(2, 2, [0, 1], order)
    cells = torch.arange(4.0)[:, None]
    x = torch.zeros(2, 4, 1)
    tokens = Tokens(x, [(4, 0)] * 2)
    tokens.add(group, cells)
    assert x[0].flatten().tolist() == [0, 2, 1, 3]
    assert torch.equal(tokens.sum(group, torch.float32), 2 * cells)
