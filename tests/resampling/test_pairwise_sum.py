"""Sums of many tensors in pairs."""

import pytest
import torch

from timm_naflex_fast.resampling.pairwise_sum import MAX_SEQUENTIAL, PairwiseSum


@pytest.mark.parametrize("rows", [None, torch.tensor([0])], ids=["complete", "rows"])
def test_sixteen_in_turn_and_then_pairs(rows):
    total = PairwiseSum(1, torch.float32)
    for _ in range(8 * MAX_SEQUENTIAL):
        total.accumulate(torch.ones(1, 1), rows)
    assert [part.item() / MAX_SEQUENTIAL for part in total._sums] == [4, 2, 1, 1]
    assert total.total() == 8 * MAX_SEQUENTIAL


def test_the_first_rows_get_what_is_shorter():
    total = PairwiseSum(3, torch.float32)
    for _ in range(2):
        total.accumulate(torch.ones(2, 1, dtype=torch.bfloat16))
    assert total.total().flatten().tolist() == [2, 2, 0]


def test_what_is_accumulated_is_not_written_to():
    part = torch.ones(1, 1)
    total = PairwiseSum(1, torch.float32)
    for _ in range(3):
        total.accumulate(part)
    assert total.total() == 3
    assert part == 1
