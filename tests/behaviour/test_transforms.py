"""Derivatives of every kind: what is linear in the tables has a tangent, in eager code, in graphs
and under vmap."""

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
COORD, WEIGHT = row_major(SIZES, 13), torch.randn(13, 4)
TABLE, LINE, ON_DEVICE, BICUBIC = (
    torch.randn(6, 5, 4),
    torch.randn(6, 4),
    torch.tensor(SIZES),
    dict(mode="bicubic"),
)
ADDS = {
    "learned": lambda x, coord: fast.add_pos_embed_(x * 1, TABLE, coord),
    "factorized": lambda x, coord: fast.add_factorized_pos_embed_(x * 1, LINE, LINE.flip(0), coord),
}
WRITES = ["export", "trace", "make_fx", "compile"]


def tokens(t):
    return 0 * t.sum() + torch.zeros(
        3, 13, 4
    )  # a transform allows writing only into what depends on its input


# Each function of ``functional``, linear in its argument.
LINEAR = {
    "resample_pos_embed": (TABLE, lambda t, **_: fast.resample_pos_embed(t, (3, 4))),
    "packed": (TABLE, lambda t, **how: fast.resample_pos_embeds(t, SIZES, mode="bilinear", **how)),
    "padded": (
        TABLE,
        lambda t, **how: fast.resample_pos_embeds(t, [(2, 4)], length=9, merge=2, **BICUBIC, **how),
    ),
    "frames": (
        TABLE,
        lambda t, **how: fast.resample_pos_embeds(
            t, [(2, 3, 4)], padding="first", **BICUBIC, **how
        ),
    ),
    "sizes on a device": (
        TABLE,
        lambda t, **how: fast.resample_pos_embeds(t, ON_DEVICE, length=12, **BICUBIC, **how),
    ),
    "add_pos_embed_": (TABLE, lambda t, **how: fast.add_pos_embed_(tokens(t), t, COORD, **how)),
    "grid_sizes": (
        TABLE,
        lambda t, **how: fast.add_pos_embed_(tokens(t), t, grid_sizes=SIZES, **how),
    ),
    "factorized": (
        LINE,
        lambda t, **how: fast.add_factorized_pos_embed_(tokens(t), t, t.flip(0), COORD, **how),
    ),
    "resample_patch_kernel": (
        torch.randn(2, 3, 8, 8),
        lambda k, **_: fast.resample_patch_kernel(k, (5, 9)),
    ),
}


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@pytest.mark.parametrize("name", LINEAR)
def test_every_function_has_tangents_gradients_and_batches(name, strategy):
    point, function = LINEAR[name][0], partial(LINEAR[name][1], strategy=strategy)
    v = torch.randn_like(point)
    want = function(v)
    assert want.abs().max() > 0.1
    out, tangent = jvp(function, (point,), (v,))
    assert relative(out, function(point)) <= 2e-6 and relative(tangent, want) <= 2e-6
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(function(forward_ad.make_dual(point, v)))
    assert relative(dual.primal, out) <= 2e-6 and relative(dual.tangent, want) <= 2e-6
    weight, leaf = torch.randn_like(want), point.clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad((function(leaf) * weight).sum(), leaf)
    assert relative(grad(lambda t: (function(t) * weight).sum())(point), by_autograd) <= 1e-5
    assert relative(vmap(function)(torch.stack([point, v])), torch.stack([out, want])) <= 2e-6


@pytest.mark.parametrize(
    "mode", [name if name == "matmul" else slow(name) for name in STRATEGY_NAMES]
)
@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_compiled_models_have_tangents(mode, kind):
    embeds = Case(sizes=SIZES, length=13, kind=kind).embeds().requires_grad_(False)
    point = {
        name: table.detach()
        for name, table in embeds.named_parameters()
        if name.startswith("pos_embed")
    }
    v = {name: torch.randn_like(table) for name, table in point.items()}
    f = lambda tables: functional_call(
        embeds, tables, (torch.zeros(3, 13, 1),), dict(patch_coord=COORD)
    )[0]

    def derivatives(point, v):
        return [
            jvp(f, (point,), (v,))[1],
            *grad(lambda tables: (f(tables) * WEIGHT).sum())(point).values(),
        ]

    with (
        enable(mode) if mode == "interpolate_cached" else running(mode)
    ):  # which is left to timm under a transform
        wants = derivatives(point, v)
        gots = torch.compile(derivatives, backend="eager", fullgraph=True)(point, v)
    assert all(
        want.abs().max() > 0.1 and relative(got, want) <= 1e-5
        for got, want in zip(gots, wants, strict=True)
    )


@pytest.mark.parametrize(
    "how", [dict(tracing_mode="real"), dict(tracing_mode="symbolic"), dict(pre_dispatch=True)]
)
@pytest.mark.parametrize("strategy", ["matmul", slow("interpolate_cached")])
def test_what_is_written_down_holds_for_other_tables(how, strategy):
    f = lambda table, x, coord: fast.add_pos_embed_(x * 1, table, coord, strategy=strategy)
    x, other, swapped = torch.zeros(3, 13, 4), torch.randn(6, 5, 4), row_major(SIZES[::-1], 13)
    for times in (0,) if "symbolic" in how.values() else (0, 3):
        for _ in range(times):
            f(TABLE, x, COORD)  # the second time a resized table is cached
        graph = make_fx(f, **how)(TABLE, x, COORD)
        assert relative(graph(other, x, swapped), f(other, x, swapped)) <= 2e-6
        assert not any("timm_naflex_fast" in str(node.target) for node in graph.graph.nodes)


# But the compiled operator of a learned table, which raises the named error.
@pytest.mark.parametrize(
    ("kind", "how"), [*product(["learned"], WRITES[:3]), *product(["factorized"], WRITES)]
)
def test_a_coordinate_that_names_no_cell_gives_no_number(kind, how):
    coord, x, module = COORD.float(), torch.zeros(3, 13, 4), torch.nn.Module()
    module.forward = ADDS[kind]
    graph, want = written(how, module, x, coord), module(x, coord)
    for value in (-1.0, float("nan"), float("inf"), 3e9, 2.0**32 - 1):
        bad = coord.clone()
        bad[0, 3, 0] = value
        got = graph(x, bad)
        assert got[0, 3].isnan().all() and relative(got[1:], want[1:]) <= 2e-6
        bad = coord.clone()
        if value < 0:
            assert relative(got[0, :3], want[0, :3]) <= 2e-6 and not got[0, 12:].isnan().any()
            bad[1, 10:] = value  # padding is not looked at
        assert relative(graph(x, bad), want) <= 2e-6


def test_no_images_and_no_channels():
    def empty(_):
        assert fast.resample_pos_embeds(TABLE, [], **BICUBIC).shape == (0, 4)
        for sizes, length in product(([], torch.zeros(0, 2, dtype=torch.int64)), (0, 5)):
            assert fast.resample_pos_embeds(TABLE, sizes, length=length, **BICUBIC).shape == (
                0,
                length,
                4,
            )

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

    run = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    for size in ((3, 4), (6, 5), (9, 2)):
        x, found = torch.randn(batch, size[0] * size[1], 4), []
        for mode in ("stock", "matmul"):
            with enable(mode):
                out = (f if mode == "stock" else run)(x, size)
                found.append(
                    [out.detach(), *torch.autograd.grad(out.square().sum(), tables(embeds))]
                )
                assert mode == "stock" or ("pos_embed", "stock") not in status().calls
        for theirs, ours in zip(*found):
            assert relative(ours, theirs) <= 1e-5


def test_why_unsupported_names_the_tensor():
    assert why_unsupported(torch.ones(2), torch.nn.Parameter(torch.ones(2))) is None
    mine = torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {}))
    assert why_unsupported(mine) == "a tensor of the class Mine"
    assert why_unsupported(torch.ones(2, device="meta")) == "a meta tensor"
    with forward_ad.dual_level():
        assert (
            why_unsupported(torch.ones(2)) is None
        )  # the level is the process's, the tangent the tensor's
        assert (
            why_unsupported(forward_ad.make_dual(torch.ones(2), torch.ones(2)))
            == "forward-mode differentiation"
        )
    with FakeTensorMode() as fake:
        assert is_tracing() and why_unsupported(fake.from_tensor(torch.ones(2))) is None
    assert not is_tracing()
