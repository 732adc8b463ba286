"""Every strategy in one compiled graph; see contract/ for the operator's own result."""

import re

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.checks import slow
from tests.support.oracles import (
    BATCH,
    NEW_TIMM,
    OLD_TORCH,
    Case,
    relative,
    small_vit,
    stock,
    trained,
    vit_batch,
    worst,
)
from tests.support.running import running
from timm_naflex_fast import __version__, status
from timm_naflex_fast.backends.operator import add_learned, learned_grad
from timm_naflex_fast.functional import add_pos_embed_

INTERPOLATE = "interpolate_cached"
SIZES = [(3, 4), (9, 2), (3, 4), (6, 5), (20, 1)]  # one grid twice, one of the table's size
VARIOUS = [[(3, 4)] * 2, [(8, 8), (2, 30), (11, 3)], [(9, 1), (1, 1)] * 2, [(5, 7)] * 5]
pytestmark = pytest.mark.skipif(OLD_TORCH, reason="its compiler traces less")


@pytest.fixture
def counter():
    """A compiler's backend that counts its graphs."""
    return CompileCounterWithBackend("aot_eager")


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="older torch has no tag")
def test_no_cuda_graph_may_hold_the_operator():
    assert torch.Tag.cudagraph_unsafe in add_learned._opoverload.tags


@pytest.mark.parametrize("operator", [add_learned, learned_grad])
def test_a_graph_that_another_release_left_on_disk_is_not_found(operator):
    """The compiler finds it by the names of its operators, and the backward pass is in it."""
    assert re.sub(r"\W", "_", __version__) in operator._opoverload.name()


def is_one_graph(counter):
    return counter.frame_count == 1


@pytest.mark.parametrize("table_size", [(6, 5), (16, 16)], ids=str)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("ar_preserving", [False, True])
def test_interpolate_cached_is_one_graph_and_bit_for_bit_timm(
    counter, table_size, mode, ar_preserving
):
    case = Case(sizes=SIZES, table_size=table_size, mode=mode, ar_preserving=ar_preserving)
    embeds = case.embeds()
    want = case.x()
    stock(case, embeds, want, case.coord())

    def add(x, table, coord):
        how = dict(strategy=INTERPOLATE, **case.options)
        return add_pos_embed_(x * 1, table, coord, **how)

    graph = torch.compile(add, backend=counter, fullgraph=True)
    got = graph(case.x(), embeds.pos_embed, case.coord())

    assert is_one_graph(counter)
    assert torch.equal(got, want)
    weight = torch.randn_like(want)
    (grad,) = torch.autograd.grad((got * weight).sum(), embeds.pos_embed)
    (want_grad,) = torch.autograd.grad((want * weight).sum(), embeds.pos_embed)
    assert relative(grad, want_grad) <= 1e-5


@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_a_whole_model_is_one_graph(counter, kind):
    model = small_vit(pos_embed=kind, depth=1)
    with running("stock"):
        want, want_grads = trained(model, BATCH)

    with running(INTERPOLATE):
        graph = torch.compile(model, backend=counter, fullgraph=True)
        got, grads = trained(model, BATCH, graph)
        assert status().calls == {("pos_embed", INTERPOLATE): 1}
        assert status().fallbacks == {}

    assert is_one_graph(counter)
    assert relative(got, want) <= 1e-5
    assert worst(grads, want_grads) <= 1e-5


def test_its_embeddings_are_bit_for_bit_timms(counter):
    model = small_vit(depth=0).embeds.requires_grad_(False)
    with running("stock"):
        want = model(BATCH["patches"], patch_coord=BATCH["patch_coord"])
    with running(INTERPOLATE):
        graph = torch.compile(model, backend=counter, fullgraph=True)
        got = graph(BATCH["patches"], patch_coord=BATCH["patch_coord"])
    assert is_one_graph(counter)
    for ours, timms in zip(got, want, strict=True):
        assert ours is timms is None or torch.equal(ours, timms)


@pytest.mark.parametrize("mode", ["matmul", INTERPOLATE, "grid_sample"])
def test_other_sizes_need_one_more_graph_at_most(counter, mode):
    if mode == "grid_sample" and not NEW_TIMM:
        pytest.skip("reads the largest grid")
    model = small_vit(depth=0)
    graph = torch.compile(model, backend=counter, fullgraph=True)
    with running(mode):
        for sizes in VARIOUS:
            batch = vit_batch(sizes)
            want, want_grads = trained(model, batch)
            got, grads = trained(model, batch, graph)
            assert relative(got, want) <= 1e-6
            assert worst(grads, want_grads) <= 1e-5
    assert counter.frame_count <= 2


# A graph of an earlier run, which the compiler has kept, would hide what this run compiles.
@torch._inductor.config.patch(fx_graph_cache=False)
@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        (INTERPOLATE, [(39, 1)]),
        slow(INTERPOLATE, [(6, 5), (6, 5)]),
        slow("matmul", [(6, 5), (6, 5)]),
        slow("grid_sample", [(39, 1)]),
    ],
)
def test_tokens_of_transposed_strides_are_trained_in_a_graph_of_inductor(strategy, sizes):
    case = Case(sizes=sizes, table_size=(6, 5), channels=8)
    table = case.embeds().pos_embed
    x = case.x().mT.contiguous().mT.requires_grad_()

    def add(x):
        return add_pos_embed_(x * 1, table, case.coord(), strategy=strategy, **case.options)

    want = add(x)
    got = torch.compile(add, fullgraph=True)(x)

    assert torch.equal(got, want)
    weight = torch.randn_like(want)
    grads = torch.autograd.grad((got * weight).sum(), (x, table))
    want_grads = torch.autograd.grad((want * weight).sum(), (x, table))
    assert torch.equal(grads[0], want_grads[0])
    assert relative(grads[1], want_grads[1]) <= 1e-5
