"""What every backend and every strategy owes: timm's own result and gradients, for any batch, in
any precision."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support import checks
from tests.support.checks import HALF, by_backend, by_functions, by_timms_method, run
from tests.support.oracles import BASE, Case, cases, relative, row_major, stock, tables
from timm_naflex_fast.backends import operator, traceable


@dataclass
class Way:
    """A backend with a strategy, and what it promises."""

    add: Any
    exact: bool = False  # bit for bit timm's
    kinds: tuple[str, ...] = ("learned", "factorized")
    sampled: bool = False  # compared with timm's ``pos_embed_use_grid_sample``, where padding gets the cell it names

    def case(self, kind, **settings):
        return Case(kind=kind, use_grid_sample=self.sampled, **settings)


WAYS = {
    "eager, matmul": Way(by_functions),
    "eager, interpolate_cached": Way(
        partial(by_functions, strategy="interpolate_cached"), exact=True
    ),
    "patched, grid_sample": Way(partial(by_timms_method, strategy="grid_sample"), sampled=True),
    "operator": Way(partial(by_backend, backend=operator), kinds=("learned",)),
    "traceable": Way(partial(by_backend, backend=traceable)),
}


def ways(*, sampled=True):
    """Parametrize by way and kind."""
    found = [(name, way) for name, way in WAYS.items() if sampled or not way.sampled]
    both = [
        pytest.param(way, kind, id=f"{name}, {kind}") for name, way in found for kind in way.kinds
    ]
    return pytest.mark.parametrize(("way", "kind"), both)


def parts(case):
    """timm's own float32 embeddings (B, N, C): the table's, or those of each factorized table by
    itself."""
    out = torch.zeros(len(tables(case.embeds())), len(case.sizes), case.length, case.channels)
    for own, x in enumerate(out):
        embeds = case.embeds()
        for i, table in enumerate(tables(embeds)):
            table.data *= i == own
        stock(case, embeds, x, case.coord())
    return out


@torch.no_grad()
def equal_but_for_ties(case, embeds, got, x):
    """Whether ``got`` is x plus timm's embedding, each part moved by at most the float32 tolerance
    before it is cast.

    Not by a count of differing numbers: one tie shows in every sample of its grid, and a factorized
    one in a line. Every rounding keeps the order, so the least parts give the least sum.
    """
    off = 2e-6 * max(1.0, *(table.abs().max().item() for table in tables(embeds)))
    least, greatest = (
        x + sum((part + d).to(case.dtype) for part in parts(case)) for d in (-off, off)
    )
    in_grid = torch.tensor(
        [[n < h * w or case.use_grid_sample for n in range(case.length)] for h, w in case.sizes]
    )
    return torch.where(in_grid[..., None], (least <= got) & (got <= greatest), got == x).all()


@ways()
@pytest.mark.parametrize("dtypes", [(torch.float32,), HALF], ids=["float32", "half"])
@given(data=st.data())
def test_equals_timm_forward_and_gradients(way, kind, dtypes, data):
    fixed = dict(antialias=True, align_corners=False) if kind == "factorized" else {}
    case = data.draw(cases(dtypes, kind=kind, use_grid_sample=way.sampled, **fixed))
    embeds, coord, x = case.embeds(), case.coord(), case.x()
    if way.exact:
        x[:, ::3] = -0.0  # padding tokens too: untouched means that the sign stays
    want, want_gx, want_gp = run(stock, case, embeds, coord, x.clone())
    got, got_gx, got_gp = run(way.add, case, embeds, coord, x.clone())
    assert torch.equal(got_gx, want_gx)
    largest = max(1.0, *(table.abs().max().item() for table in tables(embeds)))
    if way.exact:
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    elif case.dtype == torch.float32:
        assert (got - want).abs().max() <= 2e-6 * largest * (1 + (kind == "factorized"))
    else:
        assert equal_but_for_ties(case, embeds, want, x) and equal_but_for_ties(
            case, embeds, got, x
        )
    if case.dtype == torch.float32:
        assert all(relative(a, b) <= 1e-5 for a, b in zip(got_gp, want_gp))
    with torch.no_grad():  # meeting the table, filling the cache, then reading it
        assert not way.exact or all(
            torch.equal(way.add(case, embeds, x.clone(), coord), got) for _ in range(3)
        )
        with checks.Watch(lambda *_: None):  # one write to x itself
            assert not way.exact or torch.equal(way.add(case, embeds, x.clone(), coord), got)
    frozen = x.clone().requires_grad_() * 1  # frozen tables below something that trains
    way.add(case, embeds.requires_grad_(False), frozen, coord)
    assert frozen.requires_grad and torch.equal(frozen.detach(), got)


@pytest.mark.parametrize("name", ["eager, matmul", "traceable"])
@given(data=st.data())
def test_learned_is_as_close_to_float64_as_timm(name, data):
    case = data.draw(cases())
    case.channels = (
        1024 if case.length <= 64 else 128
    )  # which rounding lands nearer is luck: over many it is not
    embeds = case.embeds()
    theirs, mine, exact = torch.zeros(3, len(case.sizes), case.length, case.channels)
    exact = exact.double()
    for tokens, image in zip(
        exact, checks.one_by_one(embeds.pos_embed[0].detach(), case.sizes, **case.options)
    ):
        tokens[: len(image)] = image[: case.length]
    with torch.no_grad():
        stock(case, embeds, theirs, case.coord())
        WAYS[name].add(case, embeds, mine, case.coord())
    one_rounding = torch.finfo(torch.float32).eps * exact.abs().max()
    assert (mine - exact).abs().max() <= 1.5 * (theirs - exact).abs().max() + one_rounding


@ways()
@pytest.mark.parametrize(
    "sizes", [[(5, 7), (6, 5), (9, 3)], [(5, 7), (40, 40), (9, 3)]], ids=["own size", "forty"]
)
def test_reordered_dropped_and_doubled_tokens_get_their_own_cell_and_gradient(way, kind, sizes):
    case = way.case(kind, sizes=sizes)
    embeds, coord, length = case.embeds(), case.coord(), case.length
    want = torch.zeros(3, length, 4)
    stock(case, embeds, want, coord)
    order = torch.stack(
        [torch.cat((torch.randperm(h * w), torch.arange(h * w, length))) for h, w in sizes]
    )
    order[:, 0] = order[:, 1]  # one token twice
    order[2, -1] = order[2, 1] if way.sampled else order[2, -1]  # and padding that names a cell
    index = order[..., None].expand(-1, -1, 4)
    outs = (
        want.gather(1, index),
        way.add(case, embeds, torch.zeros(3, length, 4), coord.gather(1, index[..., :2])),
    )
    weight = torch.randn(3, length, 4)
    grads = [
        torch.autograd.grad((out * weight).sum(), tables(embeds), retain_graph=True) for out in outs
    ]
    assert all(relative(ours, timms) <= 1e-5 for timms, ours in zip(*grads))
    close = partial(torch.testing.assert_close, atol=0 if way.exact else 2e-6, rtol=0)
    h, w = sizes[1]
    kept = torch.cat(
        (torch.randperm(h * w - 1)[: h * w // 4], torch.tensor([h * w - 1]))
    )  # its corner too
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            got = way.add(case, embeds, torch.zeros(3, length, 4), coord.gather(1, index[..., :2]))
            close(got.detach(), want.gather(1, index).detach())
            got = way.add(case, embeds, torch.zeros(1, len(kept), 4), coord[1:2, kept])
            close(got.detach(), want[1:2, kept].detach())


@ways()
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_autocast_and_lowered_matmul_precision_change_nothing(way, kind, precision):
    case = way.case(kind, sizes=[(5, 7), (30, 4)], table_size=(12, 11), channels=16)
    embeds, coord = case.embeds(), case.coord()
    plain, _, plain_grads = run(way.add, case, embeds, coord)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _, mixed_grads = run(way.add, case, embeds, coord)  # backward inside autocast too
    assert torch.equal(plain, mixed) and all(map(torch.equal, plain_grads, mixed_grads))
    with checks.during(
        torch.set_float32_matmul_precision, precision, after=torch.get_float32_matmul_precision()
    ):
        lowered, _, lowered_grads = run(way.add, case, embeds, coord)
    torch.testing.assert_close(lowered, plain, atol=2e-6, rtol=0)
    assert all(relative(a, b) <= 1e-6 for a, b in zip(lowered_grads, plain_grads))


@ways(sampled=False)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ar_preserving", [False, True])
def test_a_grid_of_the_tables_size_is_added_as_it_is(way, kind, dtype, ar_preserving):
    if ar_preserving and kind == "factorized":
        pytest.skip("timm resizes both to the longer side then")
    case = way.case(
        kind, sizes=[(6, 5), (3, 4)], ar_preserving=ar_preserving, length=33, dtype=dtype
    )
    embeds = case.embeds().to(dtype)
    for table in tables(embeds):
        table.data += 1e-12
    want, got = torch.zeros(2, 33, 4, dtype=dtype), torch.zeros(2, 33, 4, dtype=dtype)
    with torch.no_grad():
        stock(case, embeds, want, case.coord())
        way.add(case, embeds, got, case.coord())
    assert torch.equal(got[0], want[0])


@ways(sampled=False)
def test_padding_keeps_every_bit_and_is_not_looked_at(way, kind):
    case = way.case(kind, sizes=[(3, 4), (1, 1)], length=20)
    embeds, x, padding = (
        case.embeds(),
        torch.full((2, 20, 4), -0.0),
        torch.ones(2, 20, dtype=torch.bool),
    )
    padding[0, :12] = padding[1, :1] = False
    x[:, -1] = torch.nan
    want = way.add(case, embeds, x.clone(), case.coord())
    bits = want.detach().view(torch.uint8)
    assert (
        torch.equal(bits[padding], x.view(torch.uint8)[padding]) and want[~padding].isfinite().all()
    )
    grad = torch.where(
        padding[..., None], torch.tensor([torch.nan, torch.inf, 1e30, 0.0]), torch.ones(2, 20, 4)
    )
    assert all(
        g.isfinite().all() and g.abs().max() < 1e3
        for g in torch.autograd.grad(want, tables(embeds), grad)
    )
    for value in (-1, -100, -(2**40)):
        coord = case.coord().masked_fill(padding[..., None], value)
        with checks.Watch(lambda *_: None) if value == -1 else nullcontext():
            got = way.add(case, embeds, x.clone(), coord)
        assert torch.equal(got.detach().view(torch.uint8), bits)


@ways()
@given(data=st.data())
def test_what_is_not_finite_in_timms_result_is_not_finite_in_ours(way, kind, data):
    fixed = dict(antialias=True, align_corners=False) if kind == "factorized" else {}
    case = data.draw(cases(kind=kind, use_grid_sample=way.sampled, largest=16, **fixed))
    embeds, value = (
        case.embeds().requires_grad_(False),
        data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf])),
    )
    for table in tables(embeds):
        table.data.flatten(0, -2)[data.draw(st.integers(0, table[..., 0].numel() - 1))] = value
    want, got = case.x(), case.x()
    stock(case, embeds, want, case.coord())
    way.add(case, embeds, got, case.coord())
    assert not got[~want.isfinite()].isfinite().any()


@ways()
@pytest.mark.parametrize("shape", [(0, 12), (2, 0)], ids=str)
def test_empty_batch(way, kind, shape):
    case = way.case(kind, sizes=[(1, 1)])
    embeds, x = case.embeds(), torch.zeros(*shape, 4, requires_grad=True) * 1
    out = way.add(case, embeds, x, torch.zeros(*shape, 2, dtype=torch.long))
    grads = torch.autograd.grad(out.sum(), tables(embeds), allow_unused=True)
    assert out.shape == (*shape, 4) and all(grad is None or not grad.any() for grad in grads)


@ways()
@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int16, torch.uint8, torch.float32, torch.float16], ids=str
)
def test_coordinates_of_any_number_dtype_and_x_a_view_that_is_not_contiguous(way, kind, dtype):
    case = way.case(kind, sizes=[(4, 5), (2, 9), (6, 5)], length=31)
    image = case.x().transpose(1, 2).contiguous()  # as a convolution's output is handed over
    turned = lambda add: (
        lambda case, embeds, out, coord: add(case, embeds, out.transpose(1, 2), coord)
    )
    want, want_gx, want_gp = run(turned(stock), case, case.embeds(), case.coord(), image)
    got, got_gx, got_gp = run(turned(way.add), case, case.embeds(), case.coord(dtype), image)
    torch.testing.assert_close(got, want, atol=2e-6 * (1 + (kind == "factorized")), rtol=0)
    assert torch.equal(got_gx, want_gx) and all(
        relative(a, b) <= 1e-5 for a, b in zip(got_gp, want_gp)
    )


def test_nothing_of_the_size_of_the_tokens_is_kept_for_the_backward_pass():
    embeds, saved = BASE.embeds(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape), lambda t: t):
        out = by_functions(BASE, embeds, (leaf := BASE.x().requires_grad_()).clone(), BASE.coord())
    assert saved == [] and torch.equal(
        *torch.autograd.grad(out, leaf, BASE.x()), BASE.x()
    )  # untouched


@pytest.mark.parametrize("sampler", ["interpolate", "grid_sample"])
def test_operator_passes_opcheck(sampler):
    spec = ("bicubic", sampler == "interpolate", False, False, sampler)
    x = torch.randn(2, 4, 12).transpose(1, 2).requires_grad_()  # results are contiguous
    table, coord = torch.randn(6, 5, 4, requires_grad=True), row_major([(3, 4), (2, 2)])
    torch.library.opcheck(operator.add_learned, (x, table, coord, *spec))
    for g in (x.detach(), x.detach().bfloat16(), x.detach()[:0].bfloat16()):
        torch.library.opcheck(
            operator.learned_grad, (g.requires_grad_(), coord[: len(g)], 6, 5, *spec)
        )
