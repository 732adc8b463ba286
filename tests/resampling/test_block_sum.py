"""Sums of many tensors in blocks."""

import pytest
import torch

from timm_naflex_fast.resampling.block_sum import MAX_SEQUENTIAL, BlockSum


@pytest.mark.parametrize("rows", [None, torch.tensor([0])], ids=["complete", "rows"])
def test_sixteen_in_turn_and_the_last_block_may_be_shorter(rows):
    total = BlockSum(1, torch.float32)
    for _ in range(2 * MAX_SEQUENTIAL + 3):
        total.add(torch.ones(1, 1), rows)
    assert [part.item() for part in total._sums] == [MAX_SEQUENTIAL, MAX_SEQUENTIAL, 3]
    assert total.total() == 2 * MAX_SEQUENTIAL + 3


def test_the_first_rows_get_what_is_shorter_and_nothing_that_is_added_is_written_to():
    total = BlockSum(3, torch.float32)
    short = torch.ones(2, 1, dtype=torch.bfloat16)
    complete = torch.ones(3, 1)
    for part in (complete, short, short):
        total.add(part)
    assert total.total().flatten().tolist() == [3, 3, 1]
    assert bool((short == 1).all() and (complete == 1).all())
