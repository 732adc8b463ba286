"""The matmul strategy against timm's own code and float64 truth."""

import pytest
import torch
from checks import HALF, as_close_to_float64_as_timm, equals_timm, run
from hypothesis import given
from oracles import BASE, NEW_TIMM, Case, cases, reference, relative, row_major, stock, tables

from timm_naflex_fast.backends import eager
from timm_naflex_fast.functional import add_factorized_pos_embed_, add_pos_embed_
from timm_naflex_fast.resampling.grids import group_grids
from timm_naflex_fast.resampling.matrices import ResizeSpec
from timm_naflex_fast.strategies import STRATEGIES


def ours(case, embeds, x, coord):
    if case.kind == "learned":
        return add_pos_embed_(x, embeds.pos_embed, coord, **case.options)
    return add_factorized_pos_embed_(x, *tables(embeds), coord, ar_preserving=case.ar_preserving)


@given(cases())
def test_learned_equals_timm_forward_and_gradients(case):
    equals_timm(ours, case)


@given(cases())
def test_learned_is_as_close_to_float64_as_timm(case):
    case.channels = 1024 if case.length <= 64 else 128
    as_close_to_float64_as_timm(ours, case)


@given(cases(dtypes=HALF))
def test_half_precision_x_is_equal_but_for_ties(case):
    embeds, coord = case.embeds(), case.coord()
    with torch.no_grad():
        want, got = case.x(), case.x()
        stock(case, embeds, want, coord)
        ours(case, embeds, got, coord)
    added = (want.float() - case.x().float()).abs()
    ulp = torch.finfo(case.dtype).eps
    off = (got.float() - want.float()).abs()
    assert (off <= ulp * (want.float().abs() + added + case.x().float().abs())).all()
    assert (off > 0).sum() <= max(2, 0.01 * off.numel())


@given(cases(kind="factorized", antialias=True, align_corners=False, dtypes=(torch.float32, *HALF)))
def test_factorized_equals_timm_forward_and_gradients(case):
    embeds, coord = case.embeds(), case.coord()
    want, want_gx, want_gp = run(stock, case, embeds, coord)
    got, got_gx, got_gp = run(ours, case, embeds, coord)
    if case.dtype == torch.float32:
        assert relative(got, want) <= 2e-6
        assert all(relative(a, b) <= 1e-5 for a, b in zip(got_gp, want_gp))
    else:
        assert relative(got, want) <= 2 * torch.finfo(case.dtype).eps
        assert ((got - want) != 0).sum() <= max(2, 0.01 * got.numel())
    assert torch.equal(got_gx, want_gx)


def add_in_float64(x, tables, coord, spec):
    groups, counts = group_grids(coord, x, embeds_padding=spec.embeds_padding)
    eager.add_groups(x, tuple(tables), groups, counts, spec, STRATEGIES["matmul"], torch.float64)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("table", [(6, 5), (40, 33)], ids=["dense", "taps"])
@pytest.mark.parametrize("antialias", [True, False])
def test_gradcheck_learned(mode, table, antialias):
    spec = ResizeSpec(mode, antialias, False, table == (6, 5))
    coord = row_major([(3, 4), (7, 2), (3, 4)])
    coord[1] = coord[1].flip(0)  # and one sample whose tokens are reordered
    values = torch.randn(1, *table, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, coord.shape[1], 2, dtype=torch.float64, requires_grad=True)

    def f(x, values):
        out = x * 1
        add_in_float64(out, (values,), coord, spec)
        return out

    assert torch.autograd.gradcheck(f, (x, values), fast_mode=table != (6, 5))


@pytest.mark.parametrize("ar", [True, False])
def test_gradcheck_factorized(ar):
    coord = row_major([(3, 4), (7, 2), (3, 4)])
    lines = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 7)]
    x = torch.randn(3, coord.shape[1], 3, dtype=torch.float64, requires_grad=True)

    def f(x, *lines):
        out = x * 1
        add_in_float64(out, lines, coord, ResizeSpec("linear", ar_preserving=ar))
        return out

    assert torch.autograd.gradcheck(f, (x, *lines))


def second_derivative(add, case, x, coord):
    embeds = case.embeds()
    out = x.requires_grad_() * 1
    add(case, embeds, out, coord)
    (grad,) = torch.autograd.grad((out**3).sum(), embeds.pos_embed, create_graph=True)
    grad.square().sum().backward()
    return embeds.pos_embed.grad


# The second one has a grid of the table's size, which timm does not resize to a square first.
@pytest.mark.parametrize(
    "case", [BASE, Case((6, 5), 4, "bicubic", True, False, True, [(4, 5), (6, 5)], 30, torch.float32, 7)]
)
def test_second_derivatives_equal_timms(case):
    want = second_derivative(stock, case, case.x(), case.coord())
    assert want.abs().max() > 0
    assert relative(second_derivative(ours, case, case.x(), case.coord()), want) <= 1e-5
    order = torch.randperm(case.sizes[0][0] * case.sizes[0][1])
    x, coord = case.x(), case.coord()
    for tokens in (x, coord):
        tokens[0, : len(order)] = tokens[0, order]
    assert relative(second_derivative(ours, case, x, coord), want) <= 1e-5


def test_second_derivatives_without_the_last_cell():
    """Another token than the last tells the height, and another one the width."""
    coord, x, got = row_major([(4, 5)])[:, :19].flip(1), torch.randn(1, 19, 4, dtype=torch.float64), []
    table = torch.randn(6, 5, 4)
    for exact in (False, True):
        leaf = table.to(torch.float64 if exact else torch.float32).requires_grad_()
        if exact:
            out = x + reference(leaf, (4, 5), ResizeSpec("bicubic")).flatten(0, 1)[None, :19].flip(1)
        else:
            out = add_pos_embed_(x.float().requires_grad_() * 1, leaf, coord, mode="bicubic")
        (grad,) = torch.autograd.grad((out**3).sum(), leaf, create_graph=True)
        got.append(torch.autograd.grad(grad.square().sum(), leaf)[0].double())
    assert relative(*got) <= 1e-5


def test_second_derivatives_that_bypass_the_table_still_work():
    embeds, x = BASE.embeds().requires_grad_(False), BASE.x().requires_grad_()
    out = ours(BASE, embeds, x * 1, BASE.coord())
    (grad,) = torch.autograd.grad((out**3).sum(), x, create_graph=True)
    grad.sum().backward()
    torch.testing.assert_close(x.grad, 6 * out.detach())


@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_reordered_and_dropped_tokens_get_their_own_cell(kind):
    sizes = [(5, 7), (4, 4), (9, 3)]
    case = Case((6, 5), 4, "bicubic", True, False, False, sizes, 35, torch.float32, 7, kind=kind)
    embeds, coord = case.embeds(), case.coord()
    want = torch.zeros(3, 35, 4)
    stock(case, embeds, want, coord)
    order = [torch.randperm(h * w) for h, w in sizes]
    shuffled, expected = coord.clone(), want.clone()
    for sample, permutation in enumerate(order):
        shuffled[sample, : len(permutation)] = coord[sample, permutation]
        expected[sample, : len(permutation)] = want[sample, permutation]
    torch.testing.assert_close(ours(case, embeds, torch.zeros(3, 35, 4), shuffled), expected, atol=2e-6, rtol=0)
    kept = torch.cat((order[0][:20], torch.tensor([34])))  # the last cell stays, so the grid does
    got = ours(case, embeds, torch.zeros(1, len(kept), 4), coord[:1, kept])
    torch.testing.assert_close(got, want[:1, kept], atol=2e-6, rtol=0)


@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_autocast_and_lowered_matmul_precision_change_nothing(kind, precision):
    case = Case((12, 11), 16, "bicubic", True, False, False, [(5, 7), (30, 4)], 120, torch.float32, 7, kind=kind)
    embeds, coord = case.embeds(), case.coord()
    plain, _, plain_grads = run(ours, case, embeds, coord)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _, mixed_grads = run(ours, case, embeds, coord)  # backward inside autocast too
    assert torch.equal(plain, mixed) and all(map(torch.equal, plain_grads, mixed_grads))
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(precision)
        lowered, _, lowered_grads = run(ours, case, embeds, coord)
    finally:
        torch.set_float32_matmul_precision(before)
    torch.testing.assert_close(lowered, plain, atol=2e-6, rtol=0)
    assert all(relative(a, b) <= 1e-6 for a, b in zip(lowered_grads, plain_grads))


def test_matrices_built_in_inference_mode_serve_training():
    case = Case((13, 3), 4, "bicubic", True, False, False, [(5, 37)], 185, torch.float32, 7)  # sizes no test met
    embeds, coord = case.embeds(), case.coord()
    with torch.inference_mode():
        ours(case, embeds, case.x(), coord)
    want, _, want_grads = run(stock, case, embeds, coord)
    got, _, got_grads = run(ours, case, embeds, coord)
    torch.testing.assert_close(got, want, atol=5e-6, rtol=0)
    assert relative(got_grads[0], want_grads[0]) <= 1e-5


def test_x_may_be_a_non_contiguous_view():
    embeds, coord = BASE.embeds(), BASE.coord()
    want, want_gx, want_gp = run(stock, BASE, embeds, coord)
    image = BASE.x().transpose(1, 2).contiguous().requires_grad_()
    base = image * 1
    view = base.transpose(1, 2)  # as a convolution's output is handed over
    ours(BASE, embeds, view, coord)
    weight = torch.randn(view.shape, generator=torch.Generator().manual_seed(3))
    gx, gp = torch.autograd.grad((view * weight).sum(), [image, embeds.pos_embed])
    torch.testing.assert_close(view, want, atol=2e-6, rtol=0)
    torch.testing.assert_close(base.transpose(1, 2), want, atol=2e-6, rtol=0)
    assert torch.equal(gx.transpose(1, 2), want_gx) and relative(gp, want_gp[0]) <= 1e-5


def test_saved_nothing_of_the_size_of_x():
    embeds, saved = BASE.embeds(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape), lambda t: t):
        ours(BASE, embeds, BASE.x().requires_grad_().clone(), BASE.coord())
    assert saved == []


@pytest.mark.skipif(not NEW_TIMM, reason="this timm has no antialias setting")
def test_radio_table():
    case = Case((128, 128), 3, "bilinear", False, True, True, [(16, 48), (31, 30)], 930, torch.float32, 7)
    embeds, coord = case.embeds(), case.coord()
    want, _, want_gp = run(stock, case, embeds, coord)
    got, _, got_gp = run(ours, case, embeds, coord)
    torch.testing.assert_close(got, want, atol=2e-6 * 5, rtol=0)
    assert relative(got_gp[0], want_gp[0]) <= 1e-5
