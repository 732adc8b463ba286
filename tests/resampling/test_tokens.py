"""Long sums of token gradients do not drift. That each token counts for its cell is compared with timm in contract/."""

import pytest
import torch

from tests.support.oracles import row_major
from timm_naflex_fast.resampling.grids import group_grids
from timm_naflex_fast.resampling.tokens import MAX_SEQUENTIAL, PairwiseSum, Tokens


def test_padding_in_half_precision_is_summed_in_float32():
    coord, x = row_major([(1, 1)], length=1002), torch.ones(1, 1002, 2, dtype=torch.bfloat16)
    (group,), counts = group_grids(coord, x, embeds_padding=True)
    total = Tokens.split(x, counts).sum(group, torch.float32)
    assert total.tolist() == [[1002.0, 1002.0]]  # 1002 and the padding's 1001 are no numbers of bfloat16


@pytest.mark.parametrize("samples", [1, 2, 7, MAX_SEQUENTIAL, MAX_SEQUENTIAL + 1, 5000])
def test_a_long_sum_does_not_drift(samples):
    x, pairwise = torch.full((samples, 1, 1), 0.1), PairwiseSum()
    (group,), counts = group_grids(row_major([(1, 1)] * samples), x)
    for part in x.clone():
        pairwise.add(part)
        assert len(pairwise._sums) <= 13
    for total in (Tokens.split(x, counts).sum(group, torch.float32), pairwise.total()):
        assert abs(total.item() / (samples * torch.tensor(0.1).double().item()) - 1) <= 1e-6
