"""Derivatives of every kind: what is linear in the tables has a tangent.

In eager code, in graphs and under vmap.
"""

from functools import partial
from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.checks import slow, written
from tests.support.oracles import Case, relative, row_major, tables
from tests.support.running import running
from timm_naflex_fast import enable, status
from timm_naflex_fast import functional as fast
from timm_naflex_fast.names import STRATEGY_NAMES
from timm_naflex_fast.tracing import is_tracing, why_unsupported

SIZES = [(3, 4), (5, 2), (3, 4)]
COORD = row_major(SIZES, 13)
TABLE = torch.randn(6, 5, 4)
LINE = torch.randn(6, 4)
KERNELS = torch.randn(2, 3, 8, 8)


def tokens(t):
    """Zeros that depend on ``t``: a transform allows writing only into what depends on its input."""
    return 0 * t.sum() + torch.zeros(3, 13, 4)


def packed(t, **how):
    return fast.resample_pos_embeds(t, SIZES, mode="bilinear", **how)


def padded(t, **how):
    return fast.resample_pos_embeds(t, [(2, 4)], length=9, merge=2, mode="bicubic", **how)


def frames(t, **how):
    return fast.resample_pos_embeds(t, [(2, 3, 4)], padding="first", mode="bicubic", **how)


def for_a_tensor_of_sizes(t, **how):
    return fast.resample_pos_embeds(t, torch.tensor(SIZES), length=12, mode="bicubic", **how)


def by_coordinates(t, **how):
    return fast.add_pos_embed_(tokens(t), t, COORD, **how)


def factorized(t, **how):
    return fast.add_factorized_pos_embed_(tokens(t), t, t.flip(0), COORD, **how)


# Every function of ``functional``, linear in its argument.
LINEAR = [
    (partial(by_strategy, strategy=strategy), point)
    for strategy in STRATEGY_NAMES
    for by_strategy, point in (
        (packed, TABLE),
        (padded, TABLE),
        (frames, TABLE),
        (for_a_tensor_of_sizes, TABLE),
        (by_coordinates, TABLE),
        (factorized, LINE),
    )
]
LINEAR.append((lambda t: fast.resample_pos_embed(t, (3, 4)), TABLE))
LINEAR.append((lambda t: fast.resample_patch_kernel(t, (5, 9)), KERNELS))


@pytest.mark.parametrize(("function", "point"), LINEAR)
def test_every_function_has_tangents_gradients_and_batches(function, point):
    v = torch.randn_like(point)
    value = function(point)
    # A linear function is its own derivative.
    want = function(v)
    assert want.abs().max() > 0.1

    out, tangent = jvp(function, (point,), (v,))
    assert relative(out, value) <= 2e-6
    assert relative(tangent, want) <= 2e-6
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(function(forward_ad.make_dual(point, v)))
    assert relative(dual.primal, value) <= 2e-6
    assert relative(dual.tangent, want) <= 2e-6

    weight = torch.randn_like(want)
    leaf = point.clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad((function(leaf) * weight).sum(), leaf)
    by_transform = grad(lambda t: (function(t) * weight).sum())(point)
    assert relative(by_transform, by_autograd) <= 1e-5

    batch = vmap(function)(torch.stack([point, v]))
    assert relative(batch, torch.stack([value, want])) <= 2e-6


@pytest.mark.parametrize("mode", ["matmul", slow("interpolate_cached"), slow("grid_sample")])
@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_compiled_models_have_tangents(mode, kind):
    embeds = Case(sizes=SIZES, length=13, kind=kind).embeds().requires_grad_(False)
    weight = torch.randn(13, 4)
    point = {}
    for name, table in embeds.named_parameters():
        if name.startswith("pos_embed"):
            point[name] = table.detach()
    v = {name: torch.randn_like(table) for name, table in point.items()}

    def f(tables):
        inputs = (torch.zeros(3, 13, 1),)
        return functional_call(embeds, tables, inputs, {"patch_coord": COORD})[0]

    def derivatives(point, v):
        _, tangent = jvp(f, (point,), (v,))
        gradient = grad(lambda tables: (f(tables) * weight).sum())(point)
        return [tangent, *gradient.values()]

    compiled = torch.compile(derivatives, backend="eager", fullgraph=True)
    # interpolate_cached is left to timm under a transform.
    with enable(mode) if mode == "interpolate_cached" else running(mode):
        wants = derivatives(point, v)
        gots = compiled(point, v)

    for got, want in zip(gots, wants, strict=True):
        assert want.abs().max() > 0.1
        assert relative(got, want) <= 1e-5


@pytest.mark.parametrize(
    "how",
    [{"tracing_mode": "real"}, {"tracing_mode": "symbolic"}, {"pre_dispatch": True}],
    ids=str,
)
@pytest.mark.parametrize("calls_before", [0, 3], ids=["", "after a resized table is kept"])
@pytest.mark.parametrize("strategy", ["matmul", slow("interpolate_cached")])
def test_what_is_written_down_holds_for_other_tables(how, calls_before, strategy):
    f = lambda table, x, coord: fast.add_pos_embed_(x * 1, table, coord, strategy=strategy)
    x = torch.zeros(3, 13, 4)
    for _ in range(calls_before):
        f(TABLE, x, COORD)

    graph = make_fx(f, **how)(TABLE, x, COORD)

    other = torch.randn(6, 5, 4)
    coord = row_major(SIZES[::-1], 13)
    assert relative(graph(other, x, coord), f(other, x, coord)) <= 2e-6
    for node in graph.graph.nodes:
        assert "timm_naflex_fast" not in str(node.target)


def add_learned(x, coord):
    return fast.add_pos_embed_(x * 1, TABLE, coord)


def add_factorized(x, coord):
    return fast.add_factorized_pos_embed_(x * 1, LINE, LINE.flip(0), coord)


# But the compiled operator of a learned table, which raises the named error.
PLAIN = [*product([add_learned, add_factorized], ["export", "trace", "make_fx"])]
PLAIN.append((add_factorized, "compile"))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 3e9, 2.0**32 - 1])
@pytest.mark.parametrize(("add", "how"), PLAIN)
def test_a_coordinate_that_names_no_cell_gives_no_number(add, how, value):
    module = torch.nn.Module()
    module.forward = add
    x = torch.zeros(3, 13, 4)
    coord = COORD.float()
    want = add(x, coord)
    graph = written(how, module, x, coord)

    bad = coord.clone()
    bad[0, 3, 0] = value
    got = graph(x, bad)

    assert got[0, 3].isnan().all()
    assert relative(got[1:], want[1:]) <= 2e-6
    if value < 0:  # a larger one tells another grid
        assert relative(got[0, :3], want[0, :3]) <= 2e-6
        assert not got[0, 12:].isnan().any()
        # Padding is not looked at.
        bad = coord.clone()
        bad[1, 10:] = value
        assert relative(graph(x, bad), want) <= 2e-6


def test_no_images_and_no_channels():
    def empty(_):
        embed = partial(fast.resample_pos_embeds, TABLE, mode="bicubic")
        assert embed([]).shape == (0, 4)
        for sizes in ([], torch.zeros(0, 2, dtype=torch.int64)):
            for length in (0, 5):
                assert embed(sizes, length=length).shape == (0, length, 4)

    empty(None)
    vmap(empty, out_dims=None)(torch.zeros(1))
    assert fast.add_pos_embed_(torch.zeros(3, 13, 0), TABLE[..., :0], COORD).shape == (3, 13, 0)


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("kind", ["learned", slow("factorized")])
def test_plain_images_of_any_size_are_one_compiled_graph(kind, batch):
    embeds = Case(kind=kind).embeds()

    def f(x, size):
        x = x * 1
        getattr(embeds, f"_apply_{kind}_pos_embed")(x, size)
        return x

    def results(run, x, size):
        out = run(x, size)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), tables(embeds))]

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    for h, w in ((3, 4), (6, 5), (9, 2)):
        x = torch.randn(batch, h * w, 4)
        wants = results(f, x, (h, w))
        with enable():
            gots = results(compiled, x, (h, w))
            assert ("pos_embed", "stock") not in status().calls
        for got, want in zip(gots, wants, strict=True):
            assert relative(got, want) <= 1e-5


def test_why_unsupported_names_the_tensor():
    plain = torch.ones(2)
    assert why_unsupported(plain, torch.nn.Parameter(plain)) is None
    mine = torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {}))
    assert why_unsupported(mine) == "a tensor of the class Mine"
    assert why_unsupported(torch.ones(2, device="meta")) == "a meta tensor"
    with forward_ad.dual_level():
        # The level is the process's, the tangent the tensor's.
        assert why_unsupported(plain) is None
        dual = forward_ad.make_dual(plain, plain)
        assert why_unsupported(dual) == "forward-mode differentiation"
    with FakeTensorMode() as fake:
        assert is_tracing()
        assert why_unsupported(fake.from_tensor(plain)) is None
    assert not is_tracing()
