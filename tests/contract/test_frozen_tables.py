"""Tables that are not trained: by every strategy resized tables are kept, and never out of date."""

import pytest
import torch

from tests.support.checks import HALF, during
from tests.support.oracles import Case, finished_tables, kept_tensors
from timm_naflex_fast.functional import add_pos_embed_
from timm_naflex_fast.names import STRATEGY_NAMES

CASE = Case(sizes=[(3, 4), (9, 2), (3, 4), (6, 3), (3, 5), (6, 5)], length=40)
pytestmark = pytest.mark.parametrize("strategy", STRATEGY_NAMES)


@pytest.fixture
def add(strategy):
    return lambda table, x=None: add_pos_embed_(
        CASE.x() if x is None else x, table, CASE.coord(), strategy=strategy
    )


def test_the_third_call_resamples_nothing_in_each_dtype_of_x(add, monkeypatch):
    table, wants = torch.randn(6, 5, 4), {}
    for dtype in (*HALF, torch.float32):
        wants[dtype] = add(table.clone(), CASE.x().to(dtype))
        assert all(torch.equal(add(table, CASE.x().to(dtype)), wants[dtype]) for _ in range(2))
    monkeypatch.setattr(torch, "embedding_bag", None)
    monkeypatch.setattr(torch.nn.functional, "interpolate", None)
    assert all(torch.equal(add(table, CASE.x().to(dtype)), want) for dtype, want in wants.items())


def swapped(tables):
    """Exchange the parameter by ``torch.utils.swap_tensors``, which a weak reference to it would
    forbid."""
    with during(torch.__future__.set_swap_module_params_on_conversion, True, after=False):
        tables.double().float()


def elsewhere(tables):
    """Move the bits, so that somebody else uses the old memory."""
    old, tables[0].data = tables[0].data, tables[0].data.clone()
    old.zero_()


WRITES = {
    "data": lambda t: t[0].data.mul_(2),
    "last bit": lambda t: t[0].data.view(-1)[-1:].mul_(1 + 2**-23),
    "in place": lambda t: t[0].mul_(2),
    "detach": lambda t: t[0].detach().neg_(),
    "numpy": lambda t: t[0].detach().numpy().__setitem__((0, 0, 0), 7.0),
    "load_state_dict": lambda t: t.load_state_dict({k: v + 1 for k, v in t.state_dict().items()}),
    "bfloat16": lambda t: t.to(torch.bfloat16),
    "bfloat16 and back": lambda t: t.to(torch.bfloat16).float(),
    "optimizer": lambda t: torch.optim.SGD(t.parameters(), 0.1).step(),
    "swapped": swapped,
    "elsewhere": elsewhere,
}


@pytest.mark.parametrize("write", [*WRITES, "in place, in inference mode"])
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_right_after_every_write(add, write, calls):
    with torch.inference_mode("inference" in write), torch.no_grad():
        tables = torch.nn.ParameterList([torch.randn(6, 5, 4)])
        tables[0].grad = torch.ones_like(tables[0])
        for _ in range(calls):
            add(tables[0])
        WRITES[write.split(",")[0]](tables)
        want = add(tables[0].detach().clone())
        for _ in range(3):
            assert torch.equal(add(tables[0]), want)


def test_a_change_or_training_drops_what_was_kept_at_once(add, strategy):
    table = torch.randn(6, 5, 4, requires_grad=True)
    with torch.no_grad():
        for _ in range(3):
            add(table)
        assert finished_tables() == 4 + (
            strategy == "grid_sample"
        )  # else a grid of its own size takes it as it is
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


def test_a_table_much_larger_than_the_grids_is_not_compared(add):
    table = torch.randn(64, 64, 4)
    for _ in range(3):
        add(table)
    assert not finished_tables()
