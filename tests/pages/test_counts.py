"""Costs that are counted: a performance test in which no clock takes part."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lab.benchmarks.costs import counting
from lab.benchmarks.counts import TRACEABLE, count_race
from tests.support.running import ran

pytestmark = pytest.mark.usefixtures("clean")
X = torch.arange(4.0)
WAITS = [X.cpu, X.tolist, X[1].item, X[1].__bool__, X.nonzero]
WAITS += [lambda: X[X > 1], lambda: torch.tensor([1], device="cpu")]


def costs(workload, batch, names):
    rows = count_race(workload, batch, names, channels=384)
    return {row["contender"]: row for row in rows}


def test_what_operators_read_and_write_and_hold():
    with FakeTensorMode():
        x = torch.zeros(10, 4)  # 160 bytes
        index = torch.tensor([1, 2, 2])  # 24 bytes
        ones = torch.ones(3, 4)  # 48 bytes
        with counting() as count:
            x.add_(1)
            x[:2].mul_(x[2:4])  # views of 32 bytes
            x.t().view(4, 10)  # nothing
            x.expand(3, 10, 4).sum(0)  # repeated elements count once; the sum is freed at once
            x.index_add_(0, index, ones)  # three rows of x, the index, and what is added
            found = x[index]
            more = found + found

    read = 160 + (32 + 32) + 160 + (48 + 24 + 48) + (48 + 24) + (48 + 48)
    written = 160 + 32 + 160 + 48 + 48 + 48
    assert count["moved"] == read + written
    assert count["operators"] == 6
    assert count["peak"] == 160
    assert more.shape == (3, 4)


CALLS = [(X.sum, 0), (lambda: X[1:].add(torch.ones(3)), 0)]
CALLS += [(call, 1) for call in WAITS]


@pytest.mark.parametrize(("call", "waits"), CALLS)
def test_what_waits_for_a_gpu(call, waits):
    with counting() as count:
        call()
    assert count["host_waits"] == waits


@ran("matmul")
def test_what_a_training_step_costs():
    contenders = ("stock", "matmul", TRACEABLE, "plain-add")
    stock, matmul, traceable, plain = costs("siglip", 48, names=contenders).values()

    # matmul's bytes are close to those of one plain add, and linear in the tokens; it reads the
    # grids once.
    assert matmul["moved"] <= 2 * plain["moved"]
    assert matmul["host_waits"] == 1
    large = costs("siglip", 96, names=("matmul",))["matmul"]
    assert large["moved"] / large["tokens"] <= 1.02 * matmul["moved"] / matmul["tokens"]

    # The traceable form never waits, and its operators do not become more with the grids.
    few_grids = costs("siglip", 2, names=(TRACEABLE,))[TRACEABLE]
    assert traceable["host_waits"] == 0
    assert traceable["operators"] == few_grids["operators"]
    assert traceable["peak"] > 0

    # timm copies the gradient for each grid, and reads each image's.
    assert stock["host_waits"] >= 96
    assert stock["moved"] > 10 * plain["moved"]
