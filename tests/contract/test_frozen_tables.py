"""Tables that are not trained: by every strategy resized tables are kept, and never out of date."""

import pytest
import torch

from tests.support.oracles import Case, finished_tables, kept_tensors, stock
from timm_naflex_fast.functional import add_pos_embed_
from timm_naflex_fast.names import STRATEGY_NAMES

CASE = Case(length=40)


pytestmark = pytest.mark.parametrize("strategy", STRATEGY_NAMES)


@pytest.fixture
def add(strategy):
    return lambda table, x=None: add_pos_embed_(CASE.x() if x is None else x, table, CASE.coord(), strategy=strategy)


def test_the_third_call_resamples_nothing(add, monkeypatch):
    table = torch.randn(6, 5, 4)
    want = add(table.clone())
    assert all(torch.equal(add(table), want) for _ in range(2))
    monkeypatch.setattr(torch, "embedding_bag", None)
    monkeypatch.setattr(torch.nn.functional, "interpolate", None)
    assert torch.equal(add(table), want)


WRITES = {
    "data": lambda t: t.data.mul_(2),
    "last bit": lambda t: t.data.view(-1)[-1:].mul_(1 + 2**-23),
    "in place": lambda t: t.mul_(2),
    "detach": lambda t: t.detach().neg_(),
    "numpy": lambda t: t.numpy().__setitem__((0, 0, 0), 7.0),
}


@pytest.mark.parametrize("write", [*WRITES, "in place, in inference mode"])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_right_after_every_write(add, write, calls):
    with torch.inference_mode("inference" in write):
        table = torch.randn(6, 5, 4)
        for _ in range(calls):
            add(table)
        WRITES[write.split(",")[0]](table)
        want = add(table.detach().clone())
        for _ in range(3):
            assert torch.equal(add(table), want)


MODULE_WRITES = {
    "load_state_dict": lambda e: e.load_state_dict({k: v + 1 for k, v in e.state_dict().items()}),
    "bfloat16": lambda e: e.to(torch.bfloat16),
    "bfloat16 and back": lambda e: e.to(torch.bfloat16).float(),
    "optimizer": lambda e: torch.optim.SGD(e.parameters(), 0.1).step(),
}


@torch.no_grad()
@pytest.mark.parametrize("write", MODULE_WRITES)
def test_right_after_every_write_to_a_model(add, strategy, write):
    case = Case(length=40, use_grid_sample=strategy == "grid_sample")
    embeds, close = case.embeds(), dict(atol=0 if strategy == "interpolate_cached" else 5e-6, rtol=0)
    for change in (lambda embeds: None, MODULE_WRITES[write]):
        for parameter in embeds.parameters():
            parameter.grad = torch.ones_like(parameter)
        change(embeds)
        want = CASE.x()
        stock(case, embeds, want, CASE.coord())
        for _ in range(3):  # meets the table, keeps finished ones, reads them
            torch.testing.assert_close(add(embeds.pos_embed), want, **close)


def test_a_change_or_training_drops_what_was_kept_at_once(add):
    table = torch.randn(6, 5, 4, requires_grad=True)
    with torch.no_grad():
        for _ in range(3):
            add(table)
        assert finished_tables()
        table.mul_(1.5)
        add(table)
        assert not finished_tables()
        add(table)
        assert finished_tables()
    out = add(table, CASE.x().requires_grad_() * 1)
    assert not finished_tables()
    out.sum().backward()
    assert table.grad.abs().max() > 0


def test_kept_in_inference_mode_it_serves_training_of_what_comes_before(add):
    table = torch.randn(6, 5, 4)
    with torch.inference_mode():
        for _ in range(3):
            add(table)
    kept = kept_tensors()
    assert kept and not any(t.is_inference() for t in kept)
    leaf = CASE.x().requires_grad_()
    out = add(table, leaf * 1)
    assert torch.equal(out.detach(), add(table.clone()))
    out.square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * out.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kept_in_the_dtype_of_x(add, dtype):
    table = torch.randn(6, 5, 4)
    for kind in (dtype, torch.float32, dtype):
        want = add(table.clone(), CASE.x().to(kind))
        for _ in range(3):
            assert torch.equal(add(table, CASE.x().to(kind)), want)


def test_a_table_much_larger_than_the_grids_is_not_compared_by_sums(add, strategy):
    table = torch.randn(64, 64, 4)
    for _ in range(3):
        add(table)
    assert bool(finished_tables()) == (strategy == "interpolate_cached")
