"""The traceable form, run eagerly, against timm's own code, float64 truth and the eager form."""

import itertools

import pytest
import torch
from checks import HALF, as_close_to_float64_as_timm, equals_timm, run
from hypothesis import given
from oracles import BASE, NEW_TIMM, Case, cases, relative, row_major, stock, tables

from timm_naflex_fast.backends import portable
from timm_naflex_fast.resampling.matrices import ResizeSpec


def ours(case, embeds, x, coord):
    if case.kind == "learned":
        portable.add(x, (embeds.pos_embed,), coord, case.spec)
    else:
        portable.add(x, tuple(tables(embeds)), coord, ResizeSpec("linear", ar_preserving=case.ar_preserving))
    return x


@given(cases())
def test_learned_equals_timm_forward_and_gradients(case):
    equals_timm(ours, case)


@given(cases())
def test_learned_is_as_close_to_float64_as_timm(case):
    case.channels = 1024 if case.length <= 64 else 128
    as_close_to_float64_as_timm(ours, case)


def parts(case, embeds):
    """timm's own float32 embeddings (B, N, C): the table's, or those of each factorized table by itself."""
    saved, out = [table.data.clone() for table in tables(embeds)], []
    for own in range(len(saved)):
        for i, table in enumerate(tables(embeds)):
            table.data.copy_(saved[i] if i == own else torch.zeros_like(saved[i]))
        out.append(torch.zeros(len(case.sizes), case.length, case.channels))
        stock(case, embeds, out[-1], case.coord())
    for table, values in zip(tables(embeds), saved):
        table.data.copy_(values)
    return out


def equal_but_for_ties(case, embeds, got):
    """Whether ``got`` is x plus timm's embedding, each part cast as it is or moved by the float32 tolerance first."""
    off = 2e-6 * max(1.0, *(table.abs().max().item() for table in tables(embeds)))
    near = [[(part + d).to(case.dtype) for d in (-off, 0, off)] for part in parts(case, embeds)]
    in_grid = torch.tensor([[n < h * w for n in range(case.length)] for h, w in case.sizes])[..., None]
    x = case.x()
    choices = torch.stack([torch.where(in_grid, x + sum(choice), x) for choice in itertools.product(*near)])
    return (choices == got).any(0).all()


# Not by a count of differing numbers: one tie shows in every sample of its grid, and a factorized one in a whole line.
@given(cases(dtypes=HALF))
def test_half_precision_x_is_equal_but_for_ties(case):
    embeds, coord = case.embeds(), case.coord()
    with torch.no_grad():
        want, got = case.x(), case.x()
        stock(case, embeds, want, coord)
        ours(case, embeds, got, coord)
        assert equal_but_for_ties(case, embeds, want) and equal_but_for_ties(case, embeds, got)


@given(cases(kind="factorized", antialias=True, align_corners=False, dtypes=(torch.float32, *HALF)))
def test_factorized_equals_timm_forward_and_gradients(case):
    embeds, coord = case.embeds(), case.coord()
    want, want_gx, want_gp = run(stock, case, embeds, coord)
    got, got_gx, got_gp = run(ours, case, embeds, coord)
    if case.dtype == torch.float32:
        assert relative(got, want) <= 2e-6
        assert all(relative(a, b) <= 1e-5 for a, b in zip(got_gp, want_gp))
    else:
        with torch.no_grad():
            assert equal_but_for_ties(case, embeds, got)
    assert torch.equal(got_gx, want_gx)


@pytest.mark.skipif(not NEW_TIMM, reason="this timm has no antialias setting")
@pytest.mark.parametrize(("mode", "side"), [("bilinear", 128), ("bicubic", 130)])
def test_large_table_without_antialias_is_gathered(mode, side, monkeypatch):
    case = Case((side, 128), 3, mode, False, True, True, [(16, 48), (31, 30), (side, 128)][:2], 930, torch.float32, 7)
    embeds, coord = case.embeds(), case.coord()
    want, _, want_gp = run(stock, case, embeds, coord)
    monkeypatch.setattr(portable, "_by_blocks", None)
    got, _, got_gp = run(ours, case, embeds, coord)
    torch.testing.assert_close(got, want, atol=2e-6 * 5, rtol=0)
    assert relative(got_gp[0], want_gp[0]) <= 1e-5


@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_grid_of_the_tables_size_is_added_as_it_is(kind, dtype):
    for ar in (False, True):
        if ar and kind == "factorized":
            continue
        case = Case((6, 5), 4, "bicubic", True, False, ar, [(6, 5), (3, 4)], 33, dtype, 7, kind=kind)
        embeds = case.embeds().to(dtype)
        for table in tables(embeds):
            table.data += 1e-12
        want, got = torch.zeros(2, 33, 4, dtype=dtype), torch.zeros(2, 33, 4, dtype=dtype)
        with torch.no_grad():
            stock(case, embeds, want, case.coord())
            ours(case, embeds, got, case.coord())
        assert torch.equal(got[0], want[0])


def test_tokens_past_the_grid_keep_every_bit():
    case = Case((6, 5), 4, "bicubic", True, False, False, [(3, 4), (1, 1)], 20, torch.float32, 7)
    embeds, x = case.embeds(), torch.full((2, 20, 4), -0.0)
    x[:, -1] = torch.nan
    with torch.no_grad():
        ours(case, embeds, x, case.coord())
    assert torch.signbit(x[0, 12:-1]).all() and torch.signbit(x[1, 1:-1]).all() and x[:, -1].isnan().all()
    assert not x[:, :-1].isnan().any()


def test_a_nan_in_the_gradient_of_padding_stays_there():
    case = Case((6, 5), 4, "bicubic", True, False, False, [(3, 4), (2, 2)], 20, torch.float32, 7)
    embeds = case.embeds()
    out = ours(case, embeds, torch.zeros(2, 20, 4), case.coord())
    grad = torch.ones(2, 20, 4)
    grad[0, 12:], grad[1, 4:] = torch.nan, torch.inf
    assert torch.autograd.grad(out, embeds.pos_embed, grad)[0].isfinite().all()


@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_reordered_and_dropped_tokens_get_their_own_cell(kind):
    sizes = [(5, 7), (40, 40), (9, 3)]
    case = Case((6, 5), 4, "bicubic", True, False, False, sizes, 1600, torch.float32, 7, kind=kind)
    embeds, coord = case.embeds(), case.coord()
    want = torch.zeros(3, 1600, 4)
    with torch.no_grad():
        stock(case, embeds, want, coord)
    order = torch.stack([torch.cat((torch.randperm(h * w), torch.arange(h * w, 1600))) for h, w in sizes])
    index = order[..., None]
    shuffled, expected = coord.gather(1, index.expand(-1, -1, 2)), want.gather(1, index.expand(-1, -1, 4))
    with torch.no_grad():
        got = ours(case, embeds, torch.zeros(3, 1600, 4), shuffled)
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=0)
        kept = torch.cat((torch.randperm(1599)[:399], torch.tensor([1599])))  # a quarter of 40 x 40, its corner too
        got = ours(case, embeds, torch.zeros(1, 400, 4), coord[1:2, kept])
    torch.testing.assert_close(got, want[1:2, kept], atol=2e-6, rtol=0)


def test_what_the_layout_cannot_hold_is_nan_and_never_wrong():
    case = Case((6, 5), 4, "bicubic", True, False, False, [(90, 90)], 8100, torch.float32, 7)
    embeds, coord = case.embeds(), case.coord()
    want = torch.zeros(1, 8100, 4)
    kept = torch.arange(90) * 91  # the diagonal: as many rows as tokens
    with torch.no_grad():
        stock(case, embeds, want, coord)
        got = ours(case, embeds, torch.zeros(1, 90, 4), coord[:, kept])
    held = ~got.isnan().any(-1)
    assert 0 < held.sum() < 90
    torch.testing.assert_close(got[held], want[:, kept][held], atol=2e-6, rtol=0)


def test_a_token_named_twice_gets_both_gradients():
    case = Case((6, 5), 4, "bicubic", True, False, False, [(3, 4)], 12, torch.float32, 7)
    embeds = case.embeds()
    coord = row_major([(3, 4)])
    coord[0, 5] = coord[0, 6]
    grad = torch.zeros(1, 12, 4)
    grad[0, 5:7] = torch.tensor([[1.0], [2.0]])
    once = torch.zeros(1, 12, 4)
    once[0, 6] = 3
    grads = []
    for upstream in (grad, once):
        out = ours(case, embeds, torch.zeros(1, 12, 4), coord)
        grads.append(torch.autograd.grad(out, embeds.pos_embed, upstream)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_autocast_and_lowered_matmul_precision_change_nothing(kind):
    case = Case((12, 11), 16, "bicubic", True, False, False, [(5, 7), (30, 4)], 120, torch.float32, 7, kind=kind)
    embeds, coord = case.embeds(), case.coord()
    plain, _, plain_grads = run(ours, case, embeds, coord)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _, mixed_grads = run(ours, case, embeds, coord)
    assert torch.equal(plain, mixed) and all(map(torch.equal, plain_grads, mixed_grads))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        lowered, _, lowered_grads = run(ours, case, embeds, coord)
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(lowered, plain, atol=2e-6, rtol=0)
    assert all(relative(a, b) <= 1e-6 for a, b in zip(lowered_grads, plain_grads))


def test_reads_nothing_back_to_the_host(monkeypatch):
    embeds, coord = BASE.embeds(), BASE.coord()

    def no_sync(*args, **kwargs):
        raise AssertionError("read back to the host")

    for read in ("tolist", "item", "__int__", "__bool__", "__index__", "__float__"):
        monkeypatch.setattr(torch.Tensor, read, no_sync)
    ours(BASE, embeds, BASE.x().requires_grad_() * 1, coord).sum().backward()
