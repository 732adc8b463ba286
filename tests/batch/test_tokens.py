"""Sums of token gradients.

That they do not drift, and that each token counts for its cell, contract/ compares with timm.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from timm_naflex_fast.batch.plan import Plan
from timm_naflex_fast.batch.tokens import Tokens
from timm_naflex_fast.resampling.spec import Resampling, ResizeSpec


def plan_of(counts, cell_index=None):
    """Images of 2 x 2 cells."""
    samples = {(2, 2): list(range(len(counts)))}
    return Plan(samples, counts, cell_index or {}, False, Resampling(ResizeSpec(), torch.float32))


def test_an_order_of_cells_is_undone_in_the_sum():
    order = torch.tensor([0, 2, 1, 3])
    size = 2, 2
    cells = torch.arange(4.0)[:, None]
    x = torch.zeros(2, 4, 1)
    tokens = Tokens(x, plan_of([(4, 0)] * 2, {0: order, 1: order}))
    tokens.add(size, cells)
    assert x[0].flatten().tolist() == [0, 2, 1, 3]
    assert torch.equal(tokens.sum_over_samples(size, torch.float32), 2 * cells)


def test_a_batch_does_not_wait_for_another_threads():
    """In a process that was forked meanwhile, nobody would end that wait."""
    begun, goes_on = threading.Event(), threading.Event()

    class Waits(list):
        def __iter__(self):
            begun.set()
            assert goes_on.wait(30)
            return super().__iter__()

    x = torch.ones(1, 4, 1)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(Tokens(x, plan_of(Waits([(4, 0)]))).in_grid, 0)
        assert begun.wait(30)
        try:
            other = pool.submit(Tokens(x, plan_of([(4, 0)])).in_grid, 0)
            assert torch.equal(other.result(10), x[0])
        finally:
            goes_on.set()
        assert torch.equal(waiting.result(30), x[0])
