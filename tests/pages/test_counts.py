"""Costs that are counted: a performance test in which no clock takes part."""

import torch
from counts import count_race, counted

from tests.support.running import ran


def costs(workload, batch, phase, **options):
    return {row["contender"]: row for row in count_race(workload, batch, phase, **options)}


def test_what_operators_read_and_write_and_what_the_host_waits_for():
    x, index = torch.zeros(10, 4), torch.tensor([1, 2, 2])
    with counted(whole=160, sample=0) as count:
        x.add_(1)  # reads 160 bytes, writes 160
        x[:2].mul_(x[2:4])  # a view: 32 + 32 read, 32 written
        x.t().view(4, 10)  # nothing
        x.expand(3, 10, 4).sum(0)  # repeated elements count once: 160 read, 160 written
        x.index_add_(0, index, torch.ones(3, 4))  # ones: 48 written; rows: 48 + 48 + 24 (index) read, 48 written
        x[index]  # 48 + 24 read, 48 written
    assert (count.read, count.written) == (160 + 64 + 160 + 120 + 72, 160 + 32 + 160 + 48 + 48 + 48)
    assert (count.operators, count.host_waits, count.whole_writes) == (6, 0, 2) and count.memory == 1072
    x = torch.arange(4)
    with counted(whole=1, sample=0) as count:
        x.max().item(), x.tolist(), bool(x[0]), x[x > 1], torch.equal(x, x)
    assert count.host_waits == 5


def test_small_tensors_that_were_just_touched_are_in_the_cache():
    x = torch.zeros(8)
    with counted(whole=1000, sample=32) as count:
        total = x + 1  # 32 bytes read, 32 written
        total += x  # both in the cache
        total += torch.zeros(9)[:8]  # 36 written: larger than a sample; the slice of 32 is not known yet
    assert count.memory == 64 + 36 + 32 and count.read + count.written == 64 + 96 + 36 + 96


@ran("matmul")
def test_what_a_training_step_costs():
    siglip = costs("siglip", 64, "train", contenders=("stock", "matmul", "plain-add"))
    stock, matmul, plain = siglip.values()
    # matmul's bytes are close to those of one plain add, and linear in the tokens.
    assert matmul["memory"] <= 1.3 * plain["memory"]
    assert matmul["read"] + matmul["written"] <= 2 * (plain["read"] + plain["written"])
    large = costs("siglip", 256, "train", contenders=("matmul",))["matmul"]
    for name in ("read", "written", "memory"):
        assert large[name] / large["tokens"] <= 1.02 * matmul[name] / matmul["tokens"]
    # It copies no gradient for each grid, and reads the grids once. Stock is what the counts would show.
    assert matmul["whole_writes"] == 0 and matmul["host_waits"] == 1
    assert stock["whole_writes"] > stock["grids"] and stock["host_waits"] >= 64
    assert stock["memory"] > 25 * plain["memory"]


@ran("matmul")
def test_counts_extended_from_few_channels_are_those_of_many(monkeypatch):
    extended = costs("diverse", 3, "train", channels=48)
    monkeypatch.setattr("counts.NARROW", (24, 48))
    assert costs("diverse", 3, "train", channels=48) == extended
