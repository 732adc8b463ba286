"""Costs that are counted: a performance test in which no clock takes part."""

from contextlib import nullcontext

import pytest
import torch
from costs import counting
from counts import NARROW, TRACEABLE, count_race
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.running import ran

pytestmark = pytest.mark.usefixtures("clean")
X = torch.arange(4.0)
WAITS = [X.cpu, X.tolist, X[1].item, X[1].__bool__, X.nonzero]
WAITS += [lambda: X[X > 1], lambda: torch.tensor([1], device="cpu")]


def costs(workload, batch, phase, **options):
    return {row["contender"]: row for row in count_race(workload, batch, phase, **options)}


def test_what_operators_read_and_write_and_hold():
    with FakeTensorMode():
        x, index, ones = torch.zeros(10, 4), torch.tensor([1, 2, 2]), torch.ones(3, 4)
        with counting() as count:
            x.add_(1)  # reads 160 bytes, writes 160
            x[:2].mul_(x[2:4])  # a view: 32 + 32 read, 32 written
            x.t().view(4, 10)  # nothing
            x.expand(3, 10, 4).sum(
                0
            )  # repeated elements count once: 160 read, 160 written, which are freed at once
            x.index_add_(0, index, ones)  # rows: 48 + 48 + 24 (index) read, 48 written
            found = x[index]  # 48 + 24 read, 48 written
            more = found + found  # 48 + 48 read, 48 written
    assert (count["read"], count["written"]) == (
        160 + 64 + 160 + 120 + 72 + 96,
        160 + 32 + 160 + 48 + 48 + 48,
    )
    assert (count["operators"], count["peak"]) == (6, 160) and more.shape == (3, 4)


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_what_waits_for_a_gpu(mode):
    for call, waits in [
        (X.sum, 0),
        (lambda: X[1:].add(torch.ones(3)), 0),
        *((call, 1) for call in WAITS),
    ]:
        with mode(), counting() as count:
            call()
        assert count["host_waits"] == waits


@ran("matmul")
def test_what_a_training_step_costs():
    contenders = ("stock", "matmul", TRACEABLE, "plain-add")
    stock, matmul, traceable, plain = costs("siglip", 48, "train", names=contenders).values()
    moved = lambda row: row["read"] + row["written"]
    # matmul's bytes are close to those of one plain add, and linear in the tokens; it reads the
    # grids once.
    assert moved(matmul) <= 2 * moved(plain) and matmul["host_waits"] == 1
    large = costs("siglip", 192, "train", names=("matmul",))["matmul"]
    assert moved(large) / large["tokens"] <= 1.02 * moved(matmul) / matmul["tokens"]
    # The traceable form never waits, and its operators do not become more with the grids.
    one = costs("siglip", 2, "train", names=(TRACEABLE,))[TRACEABLE]
    assert (
        traceable["host_waits"] == 0
        and traceable["operators"] == one["operators"]
        and traceable["peak"] > 0
    )
    # timm copies the gradient for each grid, and reads each image's.
    assert stock["host_waits"] >= 96 and moved(stock) > 10 * moved(plain)


@ran("matmul")
def test_counts_extended_from_few_channels_are_those_of_many(monkeypatch):
    extended = costs("diverse", 3, "train", channels=2 * NARROW[1])
    monkeypatch.setattr("counts.NARROW", (NARROW[1], 2 * NARROW[1]))
    assert costs("diverse", 3, "train", channels=2 * NARROW[1]) == extended
