"""Sums of token gradients. That they do not drift, and each token counts for its cell, contract/ compares with timm."""

import torch

from tests.support.oracles import row_major
from timm_naflex_fast.resampling.grids import plan_batch
from timm_naflex_fast.resampling.matrices import ResizeSpec
from timm_naflex_fast.resampling.tokens import Tokens


def test_padding_in_half_precision_is_summed_in_float32():
    coord, x = row_major([(1, 1)], length=1002), torch.ones(1, 1002, 2, dtype=torch.bfloat16)
    (group,), counts, *_ = plan_batch(x, coord, ResizeSpec(reference="grid_sample"))
    total = Tokens(x, counts).sum(group, torch.float32)
    assert total.tolist() == [[1002.0, 1002.0]]  # 1002 and the padding's 1001 are no numbers of bfloat16
