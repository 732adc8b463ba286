"""Tables that are not trained: what is resized of them is kept, and never out of date."""

from itertools import product

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
    def add(table, x=None):
        x = CASE.x() if x is None else x
        return add_pos_embed_(x, table, CASE.coord(), strategy=strategy)

    return add


def test_the_third_call_resamples_nothing_in_each_dtype_of_x(add, monkeypatch):
    table = torch.randn(6, 5, 4)
    wants = {}
    for dtype in (*HALF, torch.float32):
        wants[dtype] = add(table.clone(), CASE.x().to(dtype))
        for _ in range(2):
            assert torch.equal(add(table, CASE.x().to(dtype)), wants[dtype])

    monkeypatch.setattr(torch, "embedding_bag", None)
    monkeypatch.setattr(torch.nn.functional, "interpolate", None)
    for dtype, want in wants.items():
        assert torch.equal(add(table, CASE.x().to(dtype)), want)


def swapped(tables):
    """Exchange the parameter by ``torch.utils.swap_tensors``, which no weak reference may hold."""
    with during(torch.__future__.set_swap_module_params_on_conversion, True, after=False):
        tables.double().float()


def elsewhere(tables):
    """Move the bits, so that somebody else uses the old memory."""
    old = tables[0].data
    tables[0].data = old.clone()
    old.zero_()


def in_a_last_bit(tables):
    tables[0].data.view(-1)[-1:].mul_(1 + 2**-23)


def by_numpy(tables):
    tables[0].detach().numpy()[0, 0, 0] = 7.0


WRITES = {
    "last bit": in_a_last_bit,
    "in place": lambda tables: tables[0].mul_(2),
    "numpy": by_numpy,
    "bfloat16": lambda tables: tables.to(torch.bfloat16),
    "bfloat16 and back": lambda tables: tables.to(torch.bfloat16).float(),
    "optimizer": lambda tables: torch.optim.SGD(tables.parameters(), 0.1).step(),
    "swapped": swapped,
    "elsewhere": elsewhere,
}


@pytest.mark.parametrize("name", WRITES)
def test_right_after_every_write(add, name):
    forms = [torch.no_grad] if name != "in place" else [torch.no_grad, torch.inference_mode]
    for without_gradients, calls in product(forms, (1, 2, 3)):
        with without_gradients():
            tables = torch.nn.ParameterList([torch.randn(6, 5, 4)])
            tables[0].grad = torch.ones_like(tables[0])
            for _ in range(calls):
                add(tables[0])
            WRITES[name](tables)
            want = add(tables[0].detach().clone())
            for _ in range(3):
                assert torch.equal(add(tables[0]), want)


def test_a_change_and_training_drop_what_was_kept_at_once(add):
    table = torch.randn(6, 5, 4, requires_grad=True)
    with torch.no_grad():
        for _ in range(3):
            add(table)
        assert finished_tables() == 5
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
    tensors = kept_tensors()
    assert tensors
    assert not any(tensor.is_inference() for tensor in tensors)

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
