"""Derivatives of every kind: what is linear in the tables has a tangent.

In eager code, in graphs and under vmap.
"""

from functools import partial
from itertools import product

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.checks import slow, written
from tests.support.oracles import Case, relative, row_major
from tests.support.running import running
from timm_naflex_fast import enable
from timm_naflex_fast import functional as fast
from timm_naflex_fast.names import STRATEGY_NAMES
from timm_naflex_fast.tracing import why_unsupported

SIZES = [(3, 4), (5, 2), (3, 4)]
COORD = row_major(SIZES, 13)
TABLE = torch.randn(6, 5, 4)
ZEROS = torch.zeros(3, 13, 4)


def packed(t, **how):
    return fast.resample_pos_embeds(t, SIZES, mode="bilinear", **how)


def frames_padded(t, **how):
    return fast.resample_pos_embeds(
        t, [(2, 2, 4)], length=18, padding="first", merge=2, mode="bicubic", **how
    )


def for_a_tensor_of_sizes(t, **how):
    return fast.resample_pos_embeds(t, torch.tensor(SIZES), length=12, mode="bicubic", **how)


def learned(t, **how):
    # A transform allows writing only into what depends on its input.
    return fast.add_pos_embed_(0 * t.sum() + ZEROS, t, COORD, **how)


def factorized(t, **how):
    return fast.add_factorized_pos_embed_(0 * t.sum() + ZEROS, t[:, 0], t[0], COORD, **how)


FUNCTIONS = packed, frames_padded, for_a_tensor_of_sizes, learned, factorized
# Linear functions of a table, and the points at which they are tried.
LINEAR = [
    (partial(function, strategy=strategy), TABLE)
    for function, strategy in product(FUNCTIONS, STRATEGY_NAMES)
    if (function, strategy) != (factorized, "grid_sample")
]
LINEAR.append((lambda t: fast.resample_patch_kernel(t, (5, 9)), torch.randn(2, 3, 8, 8)))


@pytest.mark.parametrize(("function", "point"), LINEAR)
def test_every_function_has_tangents_gradients_and_batches(function, point):
    v = torch.randn_like(point)
    value = function(point)
    # A linear function is its own derivative.
    want = function(v)
    assert want.abs().max() > 0.1

    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(function(forward_ad.make_dual(point, v)))
    for out, tangent in (jvp(function, (point,), (v,)), dual):
        assert relative(out, value) <= 2e-6
        assert relative(tangent, want) <= 2e-6

    weight = torch.randn_like(want)
    leaf = point.clone().requires_grad_()
    (by_autograd,) = torch.autograd.grad((function(leaf) * weight).sum(), leaf)
    by_transform = grad(lambda t: (function(t) * weight).sum())(point)
    assert relative(by_transform, by_autograd) <= 1e-5

    batch = vmap(function)(torch.stack([point, v]))
    assert relative(batch, torch.stack([value, want])) <= 2e-6


@pytest.mark.parametrize("mode", ["matmul", slow("interpolate_cached"), slow("grid_sample")])
def test_a_compiled_model_has_tangents(mode):
    embeds = Case(sizes=SIZES, length=13).embeds().requires_grad_(False)

    def f(table):
        inputs = torch.zeros(3, 13, 1), COORD
        return functional_call(embeds, {"pos_embed": table}, inputs)[0]

    def derivatives(table, v):
        return jvp(f, (table,), (v,))[1], grad(lambda table: f(table).pow(2).sum())(table)

    compiled = torch.compile(derivatives, backend="eager", fullgraph=True)
    point = TABLE[None], torch.randn(1, 6, 5, 4)
    # interpolate_cached is left to timm under a transform.
    with enable(mode) if mode == "interpolate_cached" else running(mode):
        wants = derivatives(*point)
        gots = compiled(*point)

    for got, want in zip(gots, wants, strict=True):
        assert want.abs().max() > 0.1
        assert relative(got, want) <= 1e-5


@pytest.mark.parametrize(
    ("how", "strategy"),
    [
        ({"tracing_mode": "real"}, "grid_sample"),
        ({"tracing_mode": "symbolic"}, "matmul"),
        slow({"tracing_mode": "symbolic"}, "grid_sample"),
        ({"pre_dispatch": True}, "interpolate_cached"),
    ],
    ids=str,
)
def test_what_is_written_down_while_a_table_is_kept_holds_for_other_tables(how, strategy):
    def f(table, x, coord):
        return fast.add_pos_embed_(x * 1, table, coord, strategy=strategy)

    x = ZEROS
    for _ in range(3):
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
    return fast.add_factorized_pos_embed_(x * 1, TABLE[:, 0], TABLE[0], coord)


# But the compiled operator, which raises the named error.
PLAIN = [*product([add_learned, add_factorized], ["export", "trace", "make_fx"])]


@pytest.mark.parametrize(("add", "how"), PLAIN)
def test_a_graph_holds_for_other_grids_and_a_coordinate_that_names_no_cell_gives_no_number(
    add, how
):
    module = torch.nn.Module()
    module.forward = add
    x = ZEROS
    coord = COORD.float()
    want = add(x, coord)
    graph = written(how, module, x, coord)
    others = row_major([(1, 13), (6, 5), (2, 2)], 13, torch.float32)
    assert relative(graph(x, others), add(x, others)) <= 2e-6

    for value in (-1.0, float("nan"), float("inf"), 3e9, 2.0**32 - 1):
        bad = coord.clone()
        bad[0, 3, 0] = value
        got = graph(x, bad)
        assert got[0, 3].isnan().all()
        assert relative(got[1:], want[1:]) <= 2e-6
        if value < 0:  # a larger one tells another grid
            assert relative(got[0, :3], want[0, :3]) <= 2e-6
            assert not got[0, 12:].isnan().any()

    padding = coord.clone()
    padding[1, 10:] = -1
    assert relative(graph(x, padding), want) <= 2e-6


def test_why_unsupported_names_the_tensor():
    plain = torch.ones(2)
    assert why_unsupported(plain, torch.ones(2, device="meta")) == "a meta tensor"
    with forward_ad.dual_level():
        # The level is the process's, the tangent the tensor's.
        assert why_unsupported(plain) is None
        dual = forward_ad.make_dual(plain, plain)
        assert why_unsupported(dual) == "forward-mode differentiation"
