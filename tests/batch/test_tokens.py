"""Sums of token gradients.

That they do not drift, and that each token counts for its cell, contract/ compares with timm.
"""

import torch

from timm_naflex_fast.batch.plan import Group
from timm_naflex_fast.batch.tokens import Tokens


def test_an_order_of_cells_is_undone_in_the_sum():
    order = torch.tensor([0, 2, 1, 3])
    group = Group(2, 2, [0, 1], order)
    cells = torch.arange(4.0)[:, None]
    x = torch.zeros(2, 4, 1)
    tokens = Tokens(x, [(4, 0)] * 2)
    tokens.add(group, cells)
    assert x[0].flatten().tolist() == [0, 2, 1, 3]
    assert torch.equal(tokens.sum_over_samples(group, torch.float32), 2 * cells)
