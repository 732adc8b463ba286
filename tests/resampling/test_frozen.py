"""The matmul strategy on tables that are not trained: resized tables are kept, and never out of date."""

import pytest
import torch
from oracles import Case, finished_tables, kept_tensors, relative, stock

from timm_naflex_fast.functional import add_pos_embed_
from timm_naflex_fast.resampling import cache

CASE = Case((6, 5), 4, "bicubic", True, False, False, [(3, 4), (9, 2), (3, 4), (6, 5)], 21, torch.float32, 7)


@pytest.fixture(autouse=True)
def empty_cache():
    cache.clear_all()
    yield
    cache.clear_all()


def add(table, x=None, coord=None):
    coord = CASE.coord() if coord is None else coord
    return add_pos_embed_(CASE.x() if x is None else x, table, coord, **CASE.options)


def fresh(table):
    """The result for a table that was never met before."""
    return add(table.detach().clone())


def forbid_sums(monkeypatch):
    def no_more(*args):
        raise AssertionError("resampled again")

    monkeypatch.setattr(torch, "embedding_bag", no_more)


def test_the_third_call_resamples_nothing(monkeypatch):
    table = torch.randn(6, 5, 4)
    want = fresh(table)
    for _ in range(2):
        assert torch.equal(add(table), want)
    forbid_sums(monkeypatch)
    assert torch.equal(add(table), want)


def test_a_table_that_changes_is_never_kept():
    table = torch.randn(6, 5, 4)
    for _ in range(4):
        add(table)
        table.mul_(1.5)
        assert not finished_tables()


@pytest.mark.parametrize(
    "write",
    [
        lambda t: t.data.mul_(2),
        lambda t: t.data.view(-1)[-1:].mul_(1 + 2**-23),
        lambda t: t.mul_(2),
        lambda t: t.detach().neg_(),
        lambda t: t.numpy().__setitem__((0, 0, 0), 7.0),
    ],
    ids=["data.mul_", "last bit", "mul_", "detach", "numpy"],
)
@pytest.mark.parametrize("calls", [1, 2, 3])
def test_right_after_every_write(write, calls):
    table = torch.randn(6, 5, 4)
    for _ in range(calls):
        add(table)
    write(table)
    want = fresh(table)
    for _ in range(3):
        assert torch.equal(add(table), want)


def test_a_change_drops_what_was_kept_at_once():
    table = torch.randn(6, 5, 4)
    for _ in range(3):
        add(table)
    assert finished_tables()
    table.mul_(1.5)
    add(table)
    assert not finished_tables() and "versions" not in cache.report().lower()
    add(table)
    assert finished_tables()


def test_training_drops_what_was_kept_and_starts_anew():
    embeds = CASE.embeds()
    with torch.no_grad():
        for _ in range(3):
            add(embeds.pos_embed)
    assert finished_tables()
    out = add(embeds.pos_embed, CASE.x().requires_grad_() * 1)
    assert not finished_tables()
    out.sum().backward()
    assert embeds.pos_embed.grad.abs().max() > 0


def test_kept_in_inference_mode_it_serves_training_of_what_comes_before():
    table = torch.randn(6, 5, 4)
    with torch.inference_mode():
        for _ in range(3):
            add(table)
    kept = kept_tensors()
    assert kept and not any(t.is_inference() for t in kept)
    leaf = CASE.x().requires_grad_()
    out = add(table, leaf * 1)
    assert torch.equal(out.detach(), fresh(table))
    out.square().sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * out.detach())


def test_tables_made_in_inference_mode():
    with torch.inference_mode():
        table = torch.randn(6, 5, 4)
        want = add(table.clone())
        for _ in range(3):
            assert torch.equal(add(table), want)
        table.mul_(2)
        assert torch.equal(add(table), add(table.clone()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kept_in_the_dtype_of_x(dtype):
    table = torch.randn(6, 5, 4)
    for kind in (dtype, torch.float32, dtype):
        x = torch.zeros(4, 21, 4, dtype=kind)
        want = add(table.clone(), x.clone())
        for _ in range(3):
            assert torch.equal(add(table, x.clone()), want)


def test_a_table_larger_than_the_grids_is_not_compared():
    table = torch.randn(64, 64, 4)
    for _ in range(3):
        add(table)
    assert not finished_tables()


def test_frozen_models_equal_timm():
    embeds = CASE.embeds().requires_grad_(False)
    want = CASE.x()
    stock(CASE, embeds, want, CASE.coord())
    for _ in range(3):
        assert relative(add(embeds.pos_embed), want) <= 2e-6
