"""What every backend and every strategy owes: timm's own result and gradients.

For any batch, in any precision.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from tests.support import checks
from tests.support.checks import HALF, by_functions, by_timms_method, run
from tests.support.oracles import (
    BASE,
    NEW_TIMM,
    Case,
    cases,
    relative,
    row_major,
    seeded,
    stock,
    tables,
)
from timm_naflex_fast.functional import add_factorized_pos_embed_, add_pos_embed_
from timm_naflex_fast.patching.timm_methods import read_embeds
from timm_naflex_fast.pos_embed import graphs, kept

INTERPOLATE = "interpolate_cached"


@dataclass
class Way:
    """A way to add tables of a kind to tokens, and what it promises."""

    name: str
    add: Any
    kind: str = "learned"
    exact: bool = False  # bit for bit timm's
    # Compared with timm's ``pos_embed_use_grid_sample``, where padding gets the cell it names.
    sampled: bool = False

    def __str__(self):
        return f"{self.name}, {self.kind}"

    def case(self, **settings):
        return Case(kind=self.kind, use_grid_sample=self.sampled, **settings)

    def drawn(self, data, **fixed):
        if self.kind == "factorized":
            fixed |= dict(antialias=True, align_corners=False)
        return data.draw(cases(kind=self.kind, use_grid_sample=self.sampled, **fixed))


def by_operator(case, embeds, x, coord, strategy):
    """What ``stock`` does, by the operator of compiled graphs."""
    graphs.add(x, read_embeds(embeds)[0], coord, case.spec(), strategy, "operator")
    return x


def by_plain_operations(case, embeds, x, coord):
    """What ``stock`` does, under a transform of ``torch.func``, by what exported programs hold."""

    def add(x, *tables):
        x = x.clone()
        if case.kind == "learned":
            return add_pos_embed_(x, *tables, coord, **case.options)
        return add_factorized_pos_embed_(x, *tables, coord, ar_preserving=case.ar_preserving)

    out, _ = torch.func.vjp(add, x, *tables(embeds))
    return out


# Of coordinates.
NUMBERS = [torch.int64, torch.int16, torch.uint8, torch.float32, torch.float16]
BOTH_KINDS = [
    Way("eager, matmul", by_functions),
    Way("eager, interpolate_cached", partial(by_functions, strategy=INTERPOLATE), exact=True),
    Way("plain operations", by_plain_operations),
    Way("operator, matmul", partial(by_operator, strategy="matmul")),
    Way("patched, grid_sample", partial(by_timms_method, strategy="grid_sample"), sampled=True),
]
if not NEW_TIMM:  # whose flag takes whole coordinates alone, and is timm's own code
    BOTH_KINDS.pop()
WAYS = [
    *BOTH_KINDS,
    *(replace(way, kind="factorized") for way in BOTH_KINDS if not way.sampled),
    Way("operator, interpolate_cached", partial(by_operator, strategy=INTERPOLATE), exact=True),
]
every_way = pytest.mark.parametrize("way", WAYS, ids=str)


def largest(embeds):
    """The largest number of the tables, 1 at least."""
    return max(1.0, *(table.abs().max().item() for table in tables(embeds)))


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


def all_close(got, want):
    """Whether gradients are those that are wanted."""
    return all(relative(a, b) <= 1e-5 for a, b in zip(got, want, strict=True))


@torch.no_grad()
def equal_but_for_ties(case, embeds, got, x):
    """Whether ``got`` is x plus timm's float32 embedding, off by the float32 tolerance at most.

    The embedding is moved before it is cast, since one tie shows in every sample of its grid: a count
    of differing numbers would tell nothing. Every rounding keeps the order.
    """
    off = 2e-6 * largest(embeds) * (1 + (case.kind == "factorized"))
    embeddings = torch.zeros(x.shape)
    stock(case, case.embeds(), embeddings, case.coord())
    least = x + (embeddings - off).to(case.dtype)
    greatest = x + (embeddings + off).to(case.dtype)
    is_between = (least <= got) & (got <= greatest)
    return torch.where(embeddings != 0, is_between, got == x).all()


@every_way
@pytest.mark.parametrize("dtypes", [(torch.float32,), HALF], ids=["float32", "half"])
@given(data=st.data())
def test_equals_timm_forward_and_gradients(way, dtypes, data):
    case = way.drawn(data, dtypes=dtypes)
    embeds = case.embeds().to(data.draw(st.sampled_from([torch.float32, torch.float64])))
    coord = case.coord()
    named = coord.to(data.draw(st.sampled_from(NUMBERS)))
    if named.is_floating_point() and not way.sampled:
        named = named + 0.5  # a fraction is cut
    x = case.x()
    if data.draw(st.booleans()):
        x = x.mT.contiguous().mT  # a view, as a convolution's output is handed over
    if way.exact:
        x[:, ::3] = -0.0  # padding tokens too: untouched means that the sign stays

    want, want_gx, want_gp = run(stock, case, embeds, coord, x.clone())
    got, got_gx, got_gp = run(way.add, case, embeds, named, x.clone())

    assert torch.equal(got_gx, want_gx)
    if way.exact:
        assert torch.equal(bits(got), bits(want))
    elif case.dtype == torch.float32:
        assert (got - want).abs().max() <= 2e-6 * largest(embeds) * (1 + (way.kind == "factorized"))
    else:
        assert equal_but_for_ties(case, embeds, got, x)
    if way.kind == "learned" and not way.sampled:  # a grid of the table's size is added as it is
        is_own = (coord.amax(1) + 1 == torch.tensor(case.table_size)).all(1)
        assert torch.equal(got[is_own], want[is_own])
    if case.dtype == torch.float32:
        assert all_close(got_gp, want_gp)
        embeds.requires_grad_(False)
        for needs_grad in (True, False, False, False):  # the table is met, kept, and taken
            frozen = x.detach().requires_grad_(needs_grad) * 1
            frozen = way.add(case, embeds, frozen, coord)
            assert frozen.requires_grad == needs_grad
            assert torch.equal(bits(frozen), bits(got))


class InFloat64(TorchFunctionMode):
    """timm's own calls in float64, where it casts to float32."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        if function is F.grid_sample:
            args = [each.double() for each in args]
        return function(*args, **(kwargs or {}))


# Of many samples of one grid, or many grids, all add to the same cells: every rounding goes the same
# way.
SUMMED = {
    "samples": [(2, 3)] * 4096,
    "grids": [(h, 1) for h in range(1, 201)],
    "both": [(3, 4), (9, 2), (3, 4), (6, 5)],
}
EACH_DTYPE = [("both", dtype) for dtype in (torch.float64, torch.float32, *HALF)]


@every_way
@pytest.mark.parametrize(
    ("summed", "dtype"),
    [*EACH_DTYPE, ("samples", torch.float32), ("samples", HALF[0]), ("grids", torch.float32)],
)
def test_a_tables_gradient_is_float64s_in_each_dtype_of_the_tokens(way, dtype, summed):
    """With padding. The sum is rounded only once."""
    sizes = SUMMED[summed]
    longest = max(h * w for h, w in sizes)
    case = way.case(sizes=sizes, channels=2, length=longest + 3, dtype=dtype)
    embeds = case.embeds().double()
    weight = torch.rand(case.x().shape, generator=seeded(3)).to(dtype)
    tokens = way.add(case, embeds, case.x() * 1, case.coord())
    got = torch.autograd.grad(tokens, tables(embeds), weight)

    x = case.x().double() * 1
    with InFloat64():
        stock(case, embeds, x, case.coord())
    want = torch.autograd.grad(x, tables(embeds), weight.double())

    # Plain operations have weights in float32, and timm's flag coordinates.
    has_float32 = way.sampled or way.name == "plain operations"
    allowed = 1e-14 if dtype is torch.float64 and not has_float32 else 1e-6
    for grad, truth in zip(got, want, strict=True):
        assert relative(grad, truth) <= allowed


@pytest.mark.parametrize("add", [by_functions, by_plain_operations])
@given(data=st.data())
@torch.no_grad()
def test_learned_is_as_close_to_float64_as_timm(add, data):
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
    mine = add(case, embeds, mine, case.coord())

    one_rounding = torch.finfo(torch.float32).eps * exact.abs().max()
    assert (mine - exact).abs().max() <= 1.5 * (theirs - exact).abs().max() + one_rounding


@every_way
@given(data=st.data())
def test_each_token_gets_the_cell_that_it_names_and_gives_it_its_gradient(way, data):
    """In any order, some doubled and others lost: timm knows complete grids in their order alone."""
    case = way.drawn(data, largest=16)
    embeds = case.embeds()
    batch, length = len(case.sizes), case.length
    place = torch.arange(length).expand(batch, -1)
    is_moved = torch.rand(batch, length) < data.draw(st.sampled_from([0.1, 0.5, 1.0]))
    place = torch.where(is_moved, torch.randint(length, (batch, length)), place)
    coord = case.coord().take_along_dim(place[..., None], 1)

    sizes = coord.amax(1) + 1  # (B, 2)
    complete = replace(case, sizes=sizes.tolist(), length=None)
    grids = torch.zeros_like(complete.x())
    stock(complete, embeds, grids, complete.coord())
    cell = coord[..., 0] * sizes[:, 1:] + coord[..., 1]
    is_padding = torch.arange(length) >= sizes.prod(1, keepdim=True)
    is_embedded = torch.ones_like(is_padding) if way.sampled else ~is_padding
    want = grids.take_along_dim(cell[..., None], 1) * is_embedded[..., None]

    got = way.add(case, embeds, torch.zeros_like(want), coord)

    weight = torch.randn(want.shape)
    grad = partial(torch.autograd.grad, grad_outputs=weight)
    assert all_close(grad(got, tables(embeds)), grad(want, tables(embeds)))
    rounding = 0 if way.exact else 2e-6 * largest(embeds) * (1 + (way.kind == "factorized"))
    assert (got - want).abs().max() <= rounding
    with torch.no_grad():
        assert torch.equal(way.add(case, embeds, torch.zeros_like(want), coord), got)


def usual_and_inside(way, context):
    """The output, that of a table that is kept, and the gradients, outside and inside a context."""
    case = way.case(sizes=[(5, 7), (30, 4)], table_size=(12, 11), channels=16)
    embeds = case.embeds()
    coord = case.coord()
    x = case.x()

    def results():
        kept.clear_all()
        out, _, grads = run(way.add, case, embeds, coord, x.clone())  # the backward pass too
        with torch.no_grad():
            for _ in range(3):
                from_kept = way.add(case, embeds, x.clone(), coord)
        return [out, from_kept, *grads]

    usual = results()
    with context:
        return usual, results()


def lowered(precision):
    before = torch.get_float32_matmul_precision()
    return checks.during(torch.set_float32_matmul_precision, precision, after=before)


@contextmanager
def other_defaults():
    in_bfloat16 = checks.during(torch.set_default_dtype, torch.bfloat16, after=torch.float32)
    with torch.device("meta"), in_bfloat16:
        yield


@every_way
def test_autocast_defaults_and_lowered_matmul_precision_change_nothing(way):
    for context in (torch.autocast("cpu", torch.bfloat16), other_defaults()):
        usual, inside = usual_and_inside(way, context)
        assert all(map(torch.equal, inside, usual))
    for precision in ("high", "medium"):
        usual, inside = usual_and_inside(way, lowered(precision))
        for lower, full in zip(inside, usual, strict=True):
            assert relative(lower, full) <= 1e-6


@pytest.mark.parametrize("way", [way for way in WAYS if not way.sampled], ids=str)
@pytest.mark.parametrize("named", [0, -(2**40)])
def test_padding_keeps_every_bit_and_gives_no_gradient_whatever_it_names(way, named):
    case = way.case(sizes=[(3, 4), (1, 1)], length=20)
    embeds = case.embeds()
    x = torch.full((2, 20, 4), -0.0)
    x[:, -1] = torch.nan
    is_padding = torch.arange(20) >= torch.tensor([[12], [1]])
    want = way.add(case, embeds, x.clone(), case.coord())

    coord = case.coord().masked_fill(is_padding[..., None], named)
    out = way.add(case, embeds, x.clone(), coord)

    assert torch.equal(bits(out), bits(want))
    assert torch.equal(bits(out)[is_padding], bits(x)[is_padding])
    assert out[~is_padding].isfinite().all()
    upstream = torch.ones(2, 20, 4)
    upstream[is_padding] = torch.tensor([torch.nan, torch.inf, 1e30, 0.0])
    for grad in torch.autograd.grad(out, tables(embeds), upstream):
        assert grad.abs().max() < 1e3


@every_way
@given(data=st.data())
def test_what_is_not_finite_in_timms_result_is_not_finite_in_ours_and_nothing_else(way, data):
    case = way.drawn(data, largest=16)
    embeds = case.embeds().requires_grad_(False)
    value = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    for table in tables(embeds):
        cells = table.flatten(0, -2)
        cells[data.draw(st.integers(0, len(cells) - 1))] = value
    want = case.x()
    got = case.x()
    stock(case, embeds, want, case.coord())
    got = way.add(case, embeds, got, case.coord())
    assert not got[~want.isfinite()].isfinite().any()
    if way.name != "plain operations":  # whose product has 0 x inf in every token
        assert got[want.isfinite()].isfinite().all()


@every_way
@pytest.mark.parametrize("shape", [(0, 12), (2, 0)], ids=str)
def test_an_empty_batch_stays_empty_and_gives_no_gradient(way, shape):
    case = way.case(sizes=[(1, 1)])
    embeds = case.embeds()
    x = torch.zeros(*shape, 4, requires_grad=True) * 1
    coord = torch.zeros(*shape, 2, dtype=torch.long)
    if way.name == "plain operations" and shape == (2, 0):  # as timm
        with pytest.raises(IndexError, match="non-zero size"):
            way.add(case, embeds, x, coord)
        return
    out = way.add(case, embeds, x, coord)
    assert out.shape == (*shape, 4)
    for grad in torch.autograd.grad(out.sum(), tables(embeds), allow_unused=True):
        assert grad is None or not grad.any()


def test_nothing_of_the_size_of_the_tokens_is_kept_for_the_backward_pass():
    saved = []
    leaf = BASE.x().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape), lambda t: t):
        by_functions(BASE, BASE.embeds(), leaf.clone(), BASE.coord())
    assert saved == []


@pytest.mark.parametrize("strategy", ["matmul", INTERPOLATE, "grid_sample"])
@pytest.mark.parametrize(("samples", "dtype"), [(2, torch.float32), (0, torch.bfloat16)])
def test_operators_pass_opcheck(strategy, samples, dtype):
    x = torch.randn(2, 4, 12, dtype=dtype).transpose(1, 2)[:samples].requires_grad_()
    table = torch.randn(6, 5, 4, requires_grad=True)
    coord = row_major([(3, 4), (2, 2)])[:samples]
    is_sampled = strategy == "grid_sample"
    how = strategy, "bicubic", not is_sampled, False, False, is_sampled, is_sampled
    torch.library.opcheck(graphs.add_learned, (x, table, coord, True, *how))
    torch.library.opcheck(graphs.add_learned, (x.detach(), table.detach(), coord, False, *how))
    torch.library.opcheck(graphs.learned_grad, (x.detach(), coord, 6, 5, *how))
