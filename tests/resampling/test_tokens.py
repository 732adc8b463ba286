"""Sums of token gradients by cell, against a loop over samples and tokens."""

import pytest
import torch

from tests.support.oracles import row_major
from timm_naflex_fast.resampling.grids import group_grids
from timm_naflex_fast.resampling.tokens import IN_A_ROW, PairwiseSum, Tokens


def by_loop(x, coord, group):
    """Token by token: to the cell that its coordinate names; what stands behind a grid goes to the first cell."""
    total = torch.zeros(group.h * group.w, x.shape[2], dtype=torch.float64)
    for sample in group.samples:
        for token in range(x.shape[1]):
            y, col = coord[sample, token].tolist()
            if token < group.tokens:
                total[y * group.w + col] += x[sample, token].double()
            elif group.embeds_padding:
                total[0] += x[sample, token].double()
    return total


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("reordered", [False, True])
@pytest.mark.parametrize("length", [12, 9])  # 9: some grids are cut
def test_sums_are_those_of_a_loop(pads, reordered, length):
    sizes, x = [(3, 4), (5, 2), (3, 4), (2, 2)], torch.randn(4, length, 3)
    coord = row_major(sizes, length)
    for cells, (h, w) in zip(coord, sizes if reordered else ()):
        n = min(h * w, length) - 1  # the last stays: it tells the size of a whole grid
        cells[:n] = cells[:n].flip(0)
    groups, counts = group_grids(coord, x, embeds_padding=pads)
    tokens = Tokens.split(x, counts)
    assert sum(len(group.samples) for group in groups) == len(sizes)
    for group in groups:
        assert (group.cell_of_token is not None) == reordered
        want = by_loop(x, coord, group)
        torch.testing.assert_close(tokens.sum(group, torch.float32).double(), want, atol=1e-5, rtol=0)


def test_padding_in_half_precision_is_summed_in_float32():
    coord, x = row_major([(1, 1)], length=1002), torch.ones(1, 1002, 2, dtype=torch.bfloat16)
    (group,), counts = group_grids(coord, x, embeds_padding=True)
    total = Tokens.split(x, counts).sum(group, torch.float32)
    assert total.tolist() == [[1002.0, 1002.0]]  # 1002 and the padding's 1001 are no numbers of bfloat16


@pytest.mark.parametrize("samples", [1, IN_A_ROW, IN_A_ROW + 1, 5000])
def test_a_long_sum_does_not_drift(samples):
    x = torch.full((samples, 1, 1), 0.1)
    (group,), counts = group_grids(row_major([(1, 1)] * samples), x)
    for copy in (False, True):
        total = Tokens.split(x, counts).sum(group, torch.float32, copy)
        assert abs(total.item() / (samples * x[0].double().item()) - 1) <= 1e-6
        assert copy <= (total.data_ptr() != x.data_ptr())


@pytest.mark.parametrize("parts", [1, 2, 7, 5000])
def test_a_pairwise_sum_does_not_drift(parts):
    total = PairwiseSum()
    for _ in range(parts):
        total.add(torch.full((1,), 0.1))
        assert len(total._sums) <= 13
    assert abs(total.total().item() / (parts * torch.tensor(0.1).double().item()) - 1) <= 1e-6
