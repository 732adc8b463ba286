"""interpolate_cached: bit for bit timm's own result, and a cache that never goes stale."""

import pytest
import torch
from checks import HALF, run
from hypothesis import given
from oracles import Case, cases, finished_tables, is_pristine, kept_tensors, relative, stock, tables

import timm_naflex_fast
from timm_naflex_fast.functional import add_factorized_pos_embed_, add_pos_embed_


def ours(case, embeds, x, coord):
    if case.kind == "learned":
        return add_pos_embed_(x, embeds.pos_embed, coord, strategy="interpolate_cached", **case.options)
    add = add_factorized_pos_embed_
    return add(x, *tables(embeds), coord, strategy="interpolate_cached", ar_preserving=case.ar_preserving)


def bits(t):
    return t.view({2: torch.int16, 4: torch.int32}[t.element_size()])


def check(case):
    embeds, coord = case.embeds(), case.coord()
    x = case.x()
    x[:, ::3] = -0.0  # padding tokens too: untouched means that the sign stays
    want, want_gx, want_gp = run(stock, case, embeds, coord, x.clone())
    got, got_gx, got_gp = run(ours, case, embeds, coord, x.clone())
    assert torch.equal(bits(got), bits(want)) and torch.equal(got_gx, want_gx)
    if case.dtype == torch.float32:
        assert all(relative(a, b) <= 1e-5 for a, b in zip(got_gp, want_gp))
    with torch.no_grad():
        for _ in range(2):  # filling the cache, then reading it
            frozen = x.clone()
            ours(case, embeds, frozen, coord)
            assert torch.equal(bits(frozen), bits(want))
    frozen = x.clone().requires_grad_() * 1  # frozen tables below something that trains
    ours(case, embeds.requires_grad_(False), frozen, coord)
    assert torch.equal(bits(frozen), bits(want)) and frozen.requires_grad


@given(cases(dtypes=(torch.float32, *HALF)))
def test_learned_is_bit_identical(case):
    check(case)


@given(cases(kind="factorized", antialias=True, align_corners=False, dtypes=(torch.float32, *HALF)))
def test_factorized_is_bit_identical(case):
    check(case)


CASE = Case((6, 5), 4, "bicubic", True, False, False, [(3, 4), (9, 2), (3, 4), (6, 5)], 40, torch.float32, 7)


def agree(embeds, x=None):
    """Whether cached and stock results are bit-identical just now."""
    with torch.no_grad():
        want = CASE.x() if x is None else x.clone()
        start = want.clone()
        stock(CASE, embeds, want, CASE.coord())
        # The first call meets the table, the second keeps finished ones, the third reads them.
        return all(torch.equal(want, ours(CASE, embeds, start.clone(), CASE.coord())) for _ in range(3))


def test_second_call_reuses_the_finished_tables(monkeypatch):
    embeds = CASE.embeds()
    assert agree(embeds)

    def no_more(*args, **kwargs):
        raise AssertionError("interpolated again")

    monkeypatch.setattr(torch.nn.functional, "interpolate", no_more)
    with torch.no_grad():
        ours(CASE, embeds, CASE.x(), CASE.coord())


@pytest.mark.parametrize(
    "write",
    [
        lambda e: e.pos_embed.data.mul_(2),
        lambda e: e.pos_embed.data.view(-1)[-1:].add_(1e-7 * e.pos_embed.data.view(-1)[-1].abs() + 1e-9),
        lambda e: e.load_state_dict({k: v + 1 for k, v in e.state_dict().items()}),
        lambda e: e.to(torch.bfloat16),
        lambda e: e.to(torch.bfloat16).float(),
        lambda e: torch.optim.SGD(e.parameters(), 0.1).step(),
    ],
    ids=["data.mul_", "one element", "load_state_dict", "to(bf16)", "to(bf16).float", "optimizer.step"],
)
def test_the_next_forward_is_right_after(write):
    embeds = CASE.embeds()
    assert agree(embeds)
    for parameter in embeds.parameters():
        parameter.grad = torch.ones_like(parameter)
    write(embeds)
    assert agree(embeds)


def test_filled_in_inference_mode_it_serves_training():
    embeds, coord = CASE.embeds().requires_grad_(False), CASE.coord()
    with torch.inference_mode():
        for _ in range(2):
            ours(CASE, embeds, CASE.x(), coord)
    kept = kept_tensors()
    assert kept and not any(t.is_inference() for t in kept)
    x = CASE.x().requires_grad_()
    (ours(CASE, embeds, x * 1, coord) ** 2).sum().backward()  # frozen table: read from the cache
    embeds.requires_grad_()
    want, _, want_gp = run(stock, CASE, embeds, coord)
    got, _, got_gp = run(ours, CASE, embeds, coord)
    assert torch.equal(want, got) and relative(got_gp[0], want_gp[0]) <= 1e-5


def test_reordered_tokens_get_their_own_cell():
    embeds, coord = CASE.embeds(), CASE.coord()
    want = torch.zeros(4, 40, 4)
    stock(CASE, embeds, want, coord)
    order = torch.randperm(18)
    shuffled, expected = coord.clone(), want.clone()
    shuffled[1, :18], expected[1, :18] = coord[1, order], want[1, order]
    assert torch.equal(ours(CASE, embeds, torch.zeros(4, 40, 4), shuffled), expected)
    with torch.no_grad():
        assert torch.equal(ours(CASE, embeds, torch.zeros(4, 40, 4), shuffled), expected)


def test_double_backward_works_as_in_timm():
    embeds, x = CASE.embeds(), CASE.x().requires_grad_()
    out = ours(CASE, embeds, x * 1, CASE.coord())
    (grad,) = torch.autograd.grad((out**2).sum(), embeds.pos_embed, create_graph=True)
    grad.square().sum().backward()
    assert embeds.pos_embed.grad.abs().max() > 0


def test_disable_empties_the_cache():
    with torch.no_grad():
        embeds = CASE.embeds()
        for _ in range(2):
            ours(CASE, embeds, CASE.x(), CASE.coord())
    assert finished_tables()
    timm_naflex_fast.disable()
    assert not finished_tables() and is_pristine()
