"""What every backend and every strategy owes: timm's own result and gradients.

For any batch, in any precision.
"""

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

INTERPOLATE = "interpolate_cached"
NOT_FINITE = [torch.nan, torch.inf, -torch.inf]


@dataclass
class Way:
    """A backend with a strategy, and what it promises."""

    add: Any
    exact: bool = False  # bit for bit timm's
    kinds: tuple[str, ...] = ("learned", "factorized")
    # Compared with timm's ``pos_embed_use_grid_sample``, where padding gets the cell it names.
    sampled: bool = False

    def case(self, kind, **settings):
        return Case(kind=kind, use_grid_sample=self.sampled, **settings)


def by_operator(case, embeds, x, coord, strategy):
    """What ``stock`` does, by the operator of compiled graphs."""
    operator.add(x, tuple(tables(embeds)), coord, case.spec, strategy)
    return x


LEARNED = ("learned",)
WAYS = {
    "eager, matmul": Way(by_functions),
    "eager, interpolate_cached": Way(partial(by_functions, strategy=INTERPOLATE), exact=True),
    "patched, grid_sample": Way(partial(by_timms_method, strategy="grid_sample"), sampled=True),
    "operator, matmul": Way(partial(by_operator, strategy="matmul"), kinds=LEARNED),
    "operator, interpolate_cached": Way(
        partial(by_operator, strategy=INTERPOLATE), exact=True, kinds=LEARNED
    ),
    "traceable": Way(partial(by_backend, backend=traceable)),
}


def ways(*, sampled=True):
    """Parametrize by way and kind."""
    both = []
    for name, way in WAYS.items():
        if way.sampled and not sampled:
            continue
        for kind in way.kinds:
            both.append(pytest.param(way, kind, id=f"{name}, {kind}"))
    return pytest.mark.parametrize(("way", "kind"), both)


def drawn(data, way, kind, **fixed):
    """A case of this kind, as the way can compute it."""
    if kind == "factorized":
        fixed |= dict(antialias=True, align_corners=False)
    return data.draw(cases(kind=kind, use_grid_sample=way.sampled, **fixed))


def largest(embeds):
    """The largest number of the tables, 1 at least."""
    return max(1.0, *(table.abs().max().item() for table in tables(embeds)))


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


def all_close(got, want):
    """Whether gradients are those that are wanted."""
    return all(relative(a, b) <= 1e-5 for a, b in zip(got, want, strict=True))


def parts(case):
    """timm's own float32 embeddings (B, N, C), each factorized table's by itself."""
    out = torch.zeros(len(tables(case.embeds())), len(case.sizes), case.length, case.channels)
    for own, x in enumerate(out):
        embeds = case.embeds()
        for i, table in enumerate(tables(embeds)):
            if i != own:
                table.data.zero_()
        stock(case, embeds, x, case.coord())
    return out


@torch.no_grad()
def equal_but_for_ties(case, embeds, got, x):
    """Whether ``got`` is x plus timm's embedding, each part off by the float32 tolerance at most.

    The parts are moved before they are cast, since one tie shows in every sample of its grid, and a
    factorized one in a line: a count of differing numbers would tell nothing. Every rounding keeps
    the order, so the least parts give the least sum.
    """
    off = 2e-6 * largest(embeds)
    embeddings = parts(case)
    least = x + sum((part - off).to(case.dtype) for part in embeddings)
    greatest = x + sum((part + off).to(case.dtype) for part in embeddings)
    cells = torch.tensor([h * w for h, w in case.sizes])
    in_grid = torch.arange(case.length) < cells[:, None]
    if case.use_grid_sample:
        in_grid[:] = True
    is_between = (least <= got) & (got <= greatest)
    return torch.where(in_grid[..., None], is_between, got == x).all()


@ways()
@pytest.mark.parametrize("dtypes", [(torch.float32,), HALF], ids=["float32", "half"])
@given(data=st.data())
def test_equals_timm_forward_and_gradients(way, kind, dtypes, data):
    case = drawn(data, way, kind, dtypes=dtypes)
    embeds = case.embeds()
    coord = case.coord()
    x = case.x()
    if way.exact:
        x[:, ::3] = -0.0  # padding tokens too: untouched means that the sign stays

    want, want_gx, want_gp = run(stock, case, embeds, coord, x.clone())
    got, got_gx, got_gp = run(way.add, case, embeds, coord, x.clone())

    assert torch.equal(got_gx, want_gx)
    if way.exact:
        assert torch.equal(bits(got), bits(want))
    elif case.dtype == torch.float32:
        assert (got - want).abs().max() <= 2e-6 * largest(embeds) * (1 + (kind == "factorized"))
    else:
        assert equal_but_for_ties(case, embeds, want, x)
        assert equal_but_for_ties(case, embeds, got, x)
    if case.dtype == torch.float32:
        assert all_close(got_gp, want_gp)


@ways()
@given(data=st.data())
def test_frozen_tables_below_something_that_trains(way, kind, data):
    case = drawn(data, way, kind)
    embeds = case.embeds()
    got, _, _ = run(way.add, case, embeds, case.coord())
    frozen = case.x().requires_grad_() * 1
    way.add(case, embeds.requires_grad_(False), frozen, case.coord())
    assert frozen.requires_grad
    assert torch.equal(frozen.detach(), got)


EXACT = [name for name, way in WAYS.items() if way.exact]


@pytest.mark.parametrize("name", EXACT)
@given(data=st.data())
@torch.no_grad()
def test_bit_for_bit_whether_the_table_is_met_kept_taken_or_watched(name, data):
    way = WAYS[name]
    case = drawn(data, way, data.draw(st.sampled_from(way.kinds)))
    embeds = case.embeds()
    want = case.x()
    stock(case, embeds, want, case.coord())
    for _ in range(3):
        assert torch.equal(way.add(case, embeds, case.x(), case.coord()), want)
    with checks.Watch(lambda *_: None):  # one write to x itself
        assert torch.equal(way.add(case, embeds, case.x(), case.coord()), want)


@pytest.mark.parametrize("name", ["eager, matmul", "traceable"])
@given(data=st.data())
@torch.no_grad()
def test_learned_is_as_close_to_float64_as_timm(name, data):
    case = data.draw(cases())
    # Which rounding lands nearer is luck: over many it is not.
    case.channels = 1024 if case.length <= 64 else 128
    embeds = case.embeds()
    theirs, mine = torch.zeros(2, len(case.sizes), case.length, case.channels)
    exact = torch.zeros_like(mine, dtype=torch.float64)
    images = checks.one_by_one(embeds.pos_embed[0], case.sizes, **case.options)
    for tokens, image in zip(exact, images, strict=True):
        tokens[: len(image)] = image[: case.length]

    stock(case, embeds, theirs, case.coord())
    WAYS[name].add(case, embeds, mine, case.coord())

    one_rounding = torch.finfo(torch.float32).eps * exact.abs().max()
    assert (mine - exact).abs().max() <= 1.5 * (theirs - exact).abs().max() + one_rounding


OWN_SIZE = [(5, 7), (6, 5), (9, 3)]  # the second is the table's
LARGE = [(5, 7), (40, 40), (9, 3)]


def shuffled(case):
    """For each token of a batch, whose padding stays, the token that takes its place."""
    orders = []
    for h, w in case.sizes:
        padding = torch.arange(h * w, case.length)
        orders.append(torch.cat((torch.randperm(h * w), padding)))
    order = torch.stack(orders)
    order[:, 0] = order[:, 1]  # one token twice
    if case.use_grid_sample:
        order[2, -1] = order[2, 1]  # and padding that names a cell
    return order


@ways()
@pytest.mark.parametrize("sizes", [OWN_SIZE, LARGE], ids=["own size", "forty"])
def test_reordered_and_doubled_tokens_get_their_own_cell_and_gradient(way, kind, sizes):
    case = way.case(kind, sizes=sizes)
    embeds = case.embeds()
    in_order = torch.zeros(3, case.length, 4)
    stock(case, embeds, in_order, case.coord())
    index = shuffled(case)[..., None].expand(-1, -1, 4)
    want = in_order.gather(1, index)
    coord = case.coord().gather(1, index[..., :2])

    got = way.add(case, embeds, torch.zeros(3, case.length, 4), coord)

    weight = torch.randn(3, case.length, 4)
    want_grads = torch.autograd.grad((want * weight).sum(), tables(embeds), retain_graph=True)
    got_grads = torch.autograd.grad((got * weight).sum(), tables(embeds))
    assert all_close(got_grads, want_grads)
    close = partial(torch.testing.assert_close, atol=0 if way.exact else 2e-6, rtol=0)
    close(got, want)
    with torch.no_grad():
        close(way.add(case, embeds, torch.zeros(3, case.length, 4), coord), want)


@ways()
@pytest.mark.parametrize("sizes", [OWN_SIZE, LARGE], ids=["own size", "forty"])
@pytest.mark.parametrize("grad", [True, False])
def test_an_image_that_lost_tokens_keeps_the_cells_of_the_others(way, kind, sizes, grad):
    case = way.case(kind, sizes=sizes)
    embeds = case.embeds()
    in_order = torch.zeros(3, case.length, 4)
    stock(case, embeds, in_order, case.coord())
    h, w = sizes[1]
    corner = torch.tensor([h * w - 1])
    left = torch.cat((torch.randperm(h * w - 1)[: h * w // 4], corner))

    with torch.set_grad_enabled(grad):
        x = torch.zeros(1, len(left), 4)
        got = way.add(case, embeds, x, case.coord()[1:2, left])

    atol = 0 if way.exact else 2e-6
    torch.testing.assert_close(got, in_order[1:2, left], atol=atol, rtol=0)


@ways()
def test_autocast_changes_no_bit(way, kind):
    case = way.case(kind, sizes=[(5, 7), (30, 4)], table_size=(12, 11), channels=16)
    embeds = case.embeds()
    plain, _, plain_grads = run(way.add, case, embeds, case.coord())
    with torch.autocast("cpu", torch.bfloat16):
        mixed, _, mixed_grads = run(way.add, case, embeds, case.coord())  # the backward pass too
    assert torch.equal(plain, mixed)
    assert all(map(torch.equal, plain_grads, mixed_grads))


@ways()
@pytest.mark.parametrize("precision", ["high", "medium"])
def test_lowered_matmul_precision_changes_nothing(way, kind, precision):
    case = way.case(kind, sizes=[(5, 7), (30, 4)], table_size=(12, 11), channels=16)
    embeds = case.embeds()
    plain, _, plain_grads = run(way.add, case, embeds, case.coord())
    before = torch.get_float32_matmul_precision()
    with checks.during(torch.set_float32_matmul_precision, precision, after=before):
        lowered, _, lowered_grads = run(way.add, case, embeds, case.coord())
    torch.testing.assert_close(lowered, plain, atol=2e-6, rtol=0)
    for lower, usual in zip(lowered_grads, plain_grads, strict=True):
        assert relative(lower, usual) <= 1e-6


@ways(sampled=False)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ar_preserving", [False, True])
def test_a_grid_of_the_tables_size_is_added_as_it_is(way, kind, dtype, ar_preserving):
    if ar_preserving and kind == "factorized":
        pytest.skip("timm resizes both to the longer side then")
    sizes = [(6, 5), (3, 4)]
    case = way.case(kind, sizes=sizes, ar_preserving=ar_preserving, length=33, dtype=dtype)
    embeds = case.embeds().to(dtype).requires_grad_(False)
    for table in tables(embeds):
        table += 1e-12
    want, got = torch.zeros(2, 2, 33, 4, dtype=dtype)
    stock(case, embeds, want, case.coord())
    way.add(case, embeds, got, case.coord())
    assert torch.equal(got[0], want[0])


def padded_case(way, kind):
    """A case, its tokens, and which are padding."""
    case = way.case(kind, sizes=[(3, 4), (1, 1)], length=20)
    x = torch.full((2, 20, 4), -0.0)
    x[:, -1] = torch.nan
    is_padding = torch.arange(20) >= torch.tensor([[12], [1]])
    return case, x, is_padding


@ways(sampled=False)
def test_padding_keeps_every_bit_and_gives_no_gradient(way, kind):
    case, x, is_padding = padded_case(way, kind)
    embeds = case.embeds()

    out = way.add(case, embeds, x.clone(), case.coord())

    assert torch.equal(bits(out)[is_padding], bits(x)[is_padding])
    assert out[~is_padding].isfinite().all()
    upstream = torch.ones(2, 20, 4)
    upstream[is_padding] = torch.tensor([torch.nan, torch.inf, 1e30, 0.0])
    for grad in torch.autograd.grad(out, tables(embeds), upstream):
        assert grad.isfinite().all()
        assert grad.abs().max() < 1e3


@ways(sampled=False)
@pytest.mark.parametrize("value", [-1, -100, -(2**40)])
@pytest.mark.parametrize("is_watched", [False, True])
def test_coordinates_of_padding_are_not_looked_at(way, kind, value, is_watched):
    case, x, is_padding = padded_case(way, kind)
    embeds = case.embeds()
    want = way.add(case, embeds, x.clone(), case.coord())
    coord = case.coord().masked_fill(is_padding[..., None], value)
    with checks.Watch(lambda *_: None) if is_watched else nullcontext():
        got = way.add(case, embeds, x.clone(), coord)
    assert torch.equal(bits(got), bits(want))


@ways()
@given(data=st.data())
def test_what_is_not_finite_in_timms_result_is_not_finite_in_ours(way, kind, data):
    case = drawn(data, way, kind, largest=16)
    embeds = case.embeds().requires_grad_(False)
    value = data.draw(st.sampled_from(NOT_FINITE))
    for table in tables(embeds):
        cells = table.flatten(0, -2)
        cells[data.draw(st.integers(0, len(cells) - 1))] = value
    want = case.x()
    got = case.x()
    stock(case, embeds, want, case.coord())
    way.add(case, embeds, got, case.coord())
    assert not got[~want.isfinite()].isfinite().any()


@ways()
@pytest.mark.parametrize("shape", [(0, 12), (2, 0)], ids=str)
def test_empty_batch(way, kind, shape):
    case = way.case(kind, sizes=[(1, 1)])
    embeds = case.embeds()
    x = torch.zeros(*shape, 4, requires_grad=True) * 1
    out = way.add(case, embeds, x, torch.zeros(*shape, 2, dtype=torch.long))
    assert out.shape == (*shape, 4)
    for grad in torch.autograd.grad(out.sum(), tables(embeds), allow_unused=True):
        assert grad is None or not grad.any()


NUMBERS = [torch.int64, torch.int16, torch.uint8, torch.float32, torch.float16]


@ways()
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_coordinates_of_any_number_dtype_and_x_a_view_that_is_not_contiguous(way, kind, dtype):
    case = way.case(kind, sizes=[(4, 5), (2, 9), (6, 5)], length=31)
    image = case.x().transpose(1, 2).contiguous()  # as a convolution's output is handed over

    def turned(add):
        return lambda case, embeds, out, coord: add(case, embeds, out.transpose(1, 2), coord)

    want, want_gx, want_gp = run(turned(stock), case, case.embeds(), case.coord(), image)
    got, got_gx, got_gp = run(turned(way.add), case, case.embeds(), case.coord(dtype), image)

    atol = 2e-6 * (1 + (kind == "factorized"))
    torch.testing.assert_close(got, want, atol=atol, rtol=0)
    assert torch.equal(got_gx, want_gx)
    assert all_close(got_gp, want_gp)


def test_nothing_of_the_size_of_the_tokens_is_kept_for_the_backward_pass():
    saved = []
    leaf = BASE.x().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape), lambda t: t):
        out = by_functions(BASE, BASE.embeds(), leaf.clone(), BASE.coord())
    assert saved == []
    (grad,) = torch.autograd.grad(out, leaf, BASE.x())
    assert torch.equal(grad, BASE.x())  # untouched


STRATEGIES = ["matmul", INTERPOLATE, "grid_sample"]


def how_of(strategy):
    """The operators' arguments that tell how."""
    is_sampled = strategy == "grid_sample"
    reference = "grid_sample" if is_sampled else "interpolate"
    return "bicubic", not is_sampled, False, False, reference, strategy


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_operator_passes_opcheck(strategy):
    x = torch.randn(2, 4, 12).transpose(1, 2).requires_grad_()  # results are contiguous
    table = torch.randn(6, 5, 4, requires_grad=True)
    coord = row_major([(3, 4), (2, 2)])
    torch.library.opcheck(operator.add_learned, (x, table, coord, *how_of(strategy)))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("samples", [2, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_its_gradient_passes_opcheck(strategy, samples, dtype):
    g = torch.randn(2, 4, 12, dtype=dtype).transpose(1, 2)[:samples].requires_grad_()
    coord = row_major([(3, 4), (2, 2)])[:samples]
    torch.library.opcheck(operator.learned_grad, (g, coord, 6, 5, *how_of(strategy)))
