"""Derivatives of every kind: what is linear in the tables has a tangent, in eager code, in graphs and under vmap."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.oracles import Case, relative, row_major, small_vit, tables, vit_batch
from tests.support.running import running
from timm_naflex_fast import enable, status
from timm_naflex_fast.functional import (
    add_factorized_pos_embed_,
    add_pos_embed_,
    resample_patch_kernel,
    resample_pos_embed,
    resample_pos_embeds,
)

SIZES = [(3, 4), (5, 2), (3, 4)]
COORD, WEIGHT = row_major(SIZES, 13), torch.randn(13, 4)
TABLE, LINE, KERNEL = torch.randn(6, 5, 4), torch.randn(6, 4), torch.randn(2, 3, 8, 8)

# Each function of ``functional``, linear in its argument.
LINEAR = {
    "resample_pos_embed": (lambda t, **_: resample_pos_embed(t, (3, 4)), TABLE),
    "packed": (lambda t, **how: resample_pos_embeds(t, SIZES, mode="bilinear", **how), TABLE),
    "padded, merged": (
        lambda t, **how: resample_pos_embeds(t, [(2, 4)], mode="bicubic", length=9, merge=2, **how),
        TABLE,
    ),
    "frames": (lambda t, **how: resample_pos_embeds(t, [(2, 3, 4)], mode="bicubic", padding="first", **how), TABLE),
    "sizes on a device": (
        lambda t, **how: resample_pos_embeds(t, torch.tensor(SIZES), mode="bicubic", length=12, **how),
        TABLE,
    ),
    "add_pos_embed_": (lambda t, **how: add_pos_embed_(0 * t.sum() + torch.zeros(3, 13, 4), t, COORD, **how), TABLE),
    "grid_sizes": (
        lambda t, **how: add_pos_embed_(0 * t.sum() + torch.zeros(3, 13, 4), t, grid_sizes=SIZES, **how),
        TABLE,
    ),
    "add_factorized_pos_embed_": (
        lambda t, **how: add_factorized_pos_embed_(0 * t.sum() + torch.zeros(3, 13, 4), t, t.flip(0), COORD, **how),
        LINE,
    ),
    "resample_patch_kernel": (lambda k, **_: resample_patch_kernel(k, (5, 9)), KERNEL),
}


@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached", "grid_sample"])
@pytest.mark.parametrize("name", LINEAR)
def test_every_function_has_tangents_gradients_and_batches(name, strategy):
    function, point = LINEAR[name]
    function, v = (lambda t, f=function: f(t, strategy=strategy)), torch.randn_like(point)
    want = function(v)
    assert want.abs().max() > 0.1
    out, tangent = jvp(function, (point,), (v,))
    assert relative(out, function(point)) <= 2e-6 and relative(tangent, want) <= 2e-6
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(function(forward_ad.make_dual(point, v)))
    assert relative(dual.primal, out) <= 2e-6 and relative(dual.tangent, want) <= 2e-6
    weight = torch.randn_like(want)
    leaf = point.clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad((function(leaf) * weight).sum(), leaf)
    assert relative(grad(lambda t: (function(t) * weight).sum())(point), by_autograd) <= 1e-5
    assert relative(vmap(function)(torch.stack([point, v])), torch.stack([out, want])) <= 2e-6


def test_a_tangent_in_one_thread_is_none_of_anothers():
    with forward_ad.dual_level():  # the level is one for the whole process
        with enable("interpolate_cached"):
            small_vit()(vit_batch(SIZES))
            assert status().calls == {("pos_embed", "interpolate_cached"): 1}


@pytest.mark.parametrize("mode", ["matmul", "grid_sample", "interpolate_cached"])
@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("forward", [True, False])
def test_compiled_models_have_tangents(mode, kind, forward):
    case = Case(sizes=SIZES, length=13, kind=kind)
    embeds, x = case.embeds().requires_grad_(False), torch.zeros(3, 13, 1)
    names = [name for name, _ in embeds.named_parameters() if name.startswith("pos_embed")]
    point = {name: getattr(embeds, name).detach() for name in names}
    v = {name: torch.randn_like(table) for name, table in point.items()}

    def f(tables):
        return functional_call(embeds, tables, (x,), dict(patch_coord=COORD))[0]

    def derivative(point, v):
        if forward:
            return jvp(f, (point,), (v,))[1]
        return grad(lambda tables: (f(tables) * WEIGHT).sum())(point)[names[0]]

    with enable(mode) if mode == "interpolate_cached" else running(mode):  # which is left to timm under a transform
        want = derivative(point, v)
        assert want.abs().max() > 0.1
        got = torch.compile(derivative, backend="eager", fullgraph=mode != "interpolate_cached")(point, v)
    assert relative(got, want) <= 1e-5


def test_second_derivatives_of_a_compiled_model():
    table, x = torch.randn(6, 5, 4, requires_grad=True), torch.randn(3, 13, 4, requires_grad=True)

    def f(x, table):
        return add_pos_embed_(x * 1, table, COORD)

    found = []
    for run in (f, torch.compile(f, backend="eager", fullgraph=True)):  # AOTAutograd has no second derivatives
        grads = torch.autograd.grad((run(x, table) ** 3).sum(), (x, table), create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in grads), (x, table)))
    assert all(relative(got, want) <= 1e-5 for want, got in zip(*found))


@pytest.mark.parametrize("how", [dict(tracing_mode="real"), dict(tracing_mode="symbolic"), dict(pre_dispatch=True)])
@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])
@pytest.mark.parametrize("frozen", [True, False])
def test_what_is_written_down_holds_for_other_tables(how, strategy, frozen):
    def f(table, x, coord):
        return add_pos_embed_(x * 1, table, coord, strategy=strategy)

    x, other, swapped = torch.zeros(3, 13, 4), torch.randn(6, 5, 4), row_major(SIZES[::-1], 13)
    for _ in range(3 if frozen else 0):
        f(TABLE, x, COORD)  # a resized table is cached by now
    graph = make_fx(f, **how)(TABLE, x, COORD)
    assert relative(graph(other, x, swapped), f(other, x, swapped)) <= 2e-6
    assert not any("timm_naflex_fast" in str(node.target) for node in graph.graph.nodes)


class Adds(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x, coord):
        if self.kind == "learned":
            return add_pos_embed_(x * 1, TABLE, coord)
        return add_factorized_pos_embed_(x * 1, LINE, LINE.flip(0), coord)


@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("how", ["export", "trace", "make_fx", "compile"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 3e9, 2.0**32 - 1])
def test_a_coordinate_that_names_no_cell_gives_no_number(kind, how, value):
    if how == "compile" and kind == "learned":
        pytest.skip("the operator raises the named error")
    coord, x, module = COORD.float(), torch.zeros(3, 13, 4), Adds(kind)
    graph = {
        "export": lambda: torch.export.export(module, (x, coord)).module(),
        "trace": lambda: torch.jit.trace(module, (x, coord)),
        "make_fx": lambda: make_fx(module)(x, coord),
        "compile": lambda: torch.compile(module, backend="eager", fullgraph=True),
    }[how]()
    bad, want = coord.clone(), module(x, coord)
    bad[0, 3, 0] = value
    got = graph(x, bad)
    assert got[0, 3].isnan().all()
    assert relative(got[1:], want[1:]) <= 2e-6
    if value in (-1.0, float("-inf")):
        assert relative(got[0, :3], want[0, :3]) <= 2e-6 and not got[0, 12:].isnan().any()
    bad = coord.clone()
    bad[1, 10:] = value if value < 0 else 0  # padding is not looked at
    assert relative(graph(x, bad), want) <= 2e-6


def test_no_images_and_no_channels():
    for run in (lambda f: f(), lambda f: torch.func.vmap(lambda _: f(), out_dims=None)(torch.zeros(1))):
        assert run(lambda: resample_pos_embeds(TABLE, [], mode="bicubic")).shape == (0, 4)
        for sizes in ([], torch.zeros(0, 2, dtype=torch.int64)):
            assert run(lambda sizes=sizes: resample_pos_embeds(TABLE, sizes, mode="bicubic", length=5)).shape == (
                0,
                5,
                4,
            )
    assert add_pos_embed_(torch.zeros(3, 13, 0), TABLE[..., :0], COORD).shape == (3, 13, 0)


@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_plain_images_of_any_size_are_one_compiled_graph(kind, batch):
    case = Case(sizes=SIZES, length=13, kind=kind)
    embeds = case.embeds()
    method = f"_apply_{kind}_pos_embed"

    def f(x, size):
        x = x * 1
        getattr(embeds, method)(x, size)
        return x

    run = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    for size in ((3, 4), (6, 5), (9, 2)):
        x, found = torch.randn(batch, size[0] * size[1], 4), []
        for mode in ("stock", "matmul"):
            with enable(mode):
                out = (f if mode == "stock" else run)(x, size)
                found.append([out.detach(), *torch.autograd.grad(out.square().sum(), tables(embeds))])
                assert mode == "stock" or ("pos_embed", "stock") not in status().calls
        for theirs, ours in zip(*found):
            assert relative(ours, theirs) <= 1e-5
