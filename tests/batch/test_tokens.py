"""Sums of token gradients. That they do not drift, and each token counts for its cell, contract/
compares with timm."""

import torch

from tests.support.oracles import row_major
from timm_naflex_fast.batch.grids import GridGroup, plan_batch
from timm_naflex_fast.batch.tokens import MAX_SEQUENTIAL, PairwiseSum, Tokens
from timm_naflex_fast.functional import add_factorized_pos_embed_
from timm_naflex_fast.resampling.matrices import ResizeSpec


def test_half_precision_is_summed_in_float32_in_pairs():
    coord, x = row_major([(1, 1)], length=1002), torch.ones(1, 1002, 2, dtype=torch.bfloat16)
    (group,), counts, *_ = plan_batch(x, coord, ResizeSpec(reference="grid_sample"))
    total = Tokens(x, counts).sum(group, torch.float32)
    assert total.tolist() == [
        [1002.0, 1002.0]
    ]  # 1002 and the padding's 1001 are no numbers of bfloat16
    x, group = (
        torch.full((34, 1, 1), 1 + 2**-7, dtype=torch.bfloat16),
        GridGroup(1, 1, list(range(34))),
    )
    with torch.device("meta"):  # a default device changes nothing
        sums = [
            Tokens(each, [(1, 0)] * 34).sum(group, torch.float32).item() for each in (x, x.float())
        ]
    assert sums == [34 + 34 / 2**7] * 2  # nor these
    line = torch.zeros(1, 1, requires_grad=True)
    out = add_factorized_pos_embed_(x * 0, line, line, torch.zeros(34, 1, 2))
    assert torch.autograd.grad(out, line, x)[0].item() == 2 * (34 + 34 / 2**7)
    for rows in (None, torch.tensor([0])):
        total = PairwiseSum()
        for _ in range(8 * MAX_SEQUENTIAL):
            total.accumulate(torch.ones(1, 1), rows, 1)
        assert [p.item() / MAX_SEQUENTIAL for p in total._sums] == [
            4,
            2,
            1,
            1,
        ] and total.total() == 8 * MAX_SEQUENTIAL
