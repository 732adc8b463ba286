"""Tensors that are not plain and contiguous, batched gradients, tracers, and what may not be written to."""

import pytest
import torch

from tests.support.checks import run
from tests.support.oracles import Case, relative, row_major, stock, tables
from timm_naflex_fast.functional import (
    add_factorized_pos_embed_,
    add_pos_embed_,
    resample_pos_embed,
    resample_pos_embeds,
)

EXACT = ["matmul", "interpolate_cached"]
KINDS = ["learned", "factorized"]
SIZES = [(3, 4), (5, 2), (3, 4), (6, 5)]


def case_of(kind, dtype=torch.float32, sizes=SIZES, **settings):
    return Case(sizes=sizes, length=30, dtype=dtype, kind=kind, **settings)


def add(case, embeds, x, coord, strategy):
    if case.kind == "learned":
        return add_pos_embed_(x, embeds.pos_embed, coord, strategy=strategy)
    return add_factorized_pos_embed_(x, *tables(embeds), coord, strategy=strategy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("samples", [64, 512])
def test_the_gradient_of_many_samples_on_one_grid_in_half_precision(kind, strategy, dtype, samples):
    case = case_of(kind, dtype, [(3, 4)] * samples)
    embeds, weight = case.embeds(), torch.randn(samples, 30, 4)

    def gradients(add, dtype):
        out = torch.zeros(samples, 30, 4, dtype=dtype, requires_grad=True) * 1
        add(out)
        return torch.autograd.grad((out * weight.to(dtype)).sum(), tables(embeds))

    truth = gradients(lambda x: stock(case, embeds, x, case.coord()), torch.float64)
    theirs = gradients(lambda x: stock(case, embeds, x, case.coord()), dtype)
    mine = gradients(lambda x: add(case, embeds, x, case.coord(), strategy), dtype)
    for exact, timms, ours in zip(truth, theirs, mine):
        # The gradient that arrives is rounded to the tokens' dtype; nothing else may be.
        assert relative(ours, exact) <= max(relative(timms, exact), 2 * torch.finfo(dtype).eps)
        assert relative(ours, exact) < 0.01


@pytest.mark.parametrize("strategy", [*EXACT, "grid_sample"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_that_share_memory_are_refused_before_anything_is_written(strategy, kind):
    case = case_of(kind, sizes=[(3, 4)] * 3)
    x = torch.zeros(1, 30, 4).expand(3, -1, -1)
    with pytest.raises(RuntimeError, match="unsupported operation"):
        stock(case, case.embeds(), x, case.coord())
    with pytest.raises(RuntimeError, match="several of its elements are one"):
        add(case, case.embeds(), x, case.coord(), strategy)
    assert (x == 0).all()


@pytest.mark.parametrize("strategy", [*EXACT, "grid_sample"])
@pytest.mark.parametrize("view", [False, True])
def test_a_leaf_is_refused_before_anything_is_written(strategy, view):
    case = case_of("learned")
    leaf = torch.zeros(4, 30, 4, requires_grad=True)
    for mine in (False, True):
        with pytest.raises(RuntimeError, match="leaf"):
            x = leaf[:] if view else leaf
            if mine:
                add(case, case.embeds(), x, case.coord(), strategy)
            else:
                stock(case, case.embeds(), x, case.coord())
    assert (leaf == 0).all()


LAYOUTS = {
    "NCHW": lambda t: t.detach().permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1),
    "slice": lambda t: torch.cat([t.detach(), t.detach()], -1)[..., : t.shape[-1]],
    "every second": lambda t: t.detach().repeat_interleave(2, 1)[:, ::2],
    "transposed": lambda t: t.detach().transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda t: t.detach()[:, :1].expand_as(t),
}


@pytest.mark.parametrize("strategy", [*EXACT, "grid_sample"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_that_are_not_contiguous(strategy, layout):
    case = case_of("learned", use_grid_sample=strategy == "grid_sample")
    embeds = case.embeds()
    embeds.pos_embed = torch.nn.Parameter(LAYOUTS[layout](embeds.pos_embed))
    assert not embeds.pos_embed.is_contiguous()
    want, _, want_grad = run(stock, case, embeds, case.coord())
    got, _, got_grad = run(lambda c, e, x, at: add(c, e, x, at, strategy), case, embeds, case.coord())
    assert relative(got, want) <= 2e-6 and relative(got_grad[0], want_grad[0]) <= 1e-5
    if strategy != "grid_sample":
        table = embeds.pos_embed[0]
        assert torch.allclose(resample_pos_embed(table, (3, 4)), resample_pos_embed(table.clone(), (3, 4)))
        packed = resample_pos_embeds(table, SIZES, mode="bicubic", strategy=strategy)
        again = resample_pos_embeds(table.contiguous(), SIZES, mode="bicubic", strategy=strategy)
        assert torch.allclose(packed, again)


@pytest.mark.parametrize("strategy", [*EXACT, "grid_sample"])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_of_gradients(strategy, kind):
    case = case_of(kind, use_grid_sample=strategy == "grid_sample")
    found = []
    for adds in (stock, lambda c, e, x, at: add(c, e, x, at, strategy)):
        embeds, leaf = case.embeds(), case.x().requires_grad_()
        scale = torch.ones(4, requires_grad=True)
        out = leaf * scale
        adds(case, embeds, out, case.coord())
        upstream = torch.randn(5, *out.shape, generator=torch.Generator().manual_seed(1))
        inputs = [leaf, scale, *tables(embeds)]
        found.append(torch.autograd.grad(out, inputs, upstream, is_grads_batched=True))
    for theirs, mine in zip(*found):
        assert mine.shape == theirs.shape and relative(mine, theirs) <= 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", ["matmul", "grid_sample"])
@pytest.mark.parametrize("grad", [False, True])
def test_jit_trace_holds_for_other_grids(kind, strategy, grad):
    case = case_of(kind, use_grid_sample=strategy == "grid_sample")
    embeds = case.embeds()

    class Embed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embeds = embeds

        def forward(self, x, coord):
            out = x * 1
            add(case, self.embeds, out, coord, strategy)
            return out

    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(Embed(), (case.x(), case.coord()))
        other = row_major([(5, 6), (2, 2), (1, 30), (7, 3)], 30)
        want = case.x()
        with torch.no_grad():
            stock(case, embeds, want, other)
        torch.testing.assert_close(traced(case.x(), other).detach(), want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("strategy", [*EXACT, "grid_sample"])
def test_jacobians_by_vmap(strategy):
    table, coord = torch.randn(3, 4, 2, dtype=torch.float64), row_major([(2, 3), (4, 1)])

    def embed(table):
        return add_pos_embed_(torch.zeros(2, 6, 2, dtype=torch.float64), table * 1, coord, strategy=strategy)

    by_loop = torch.autograd.functional.jacobian(embed, table)
    by_vmap = torch.autograd.functional.jacobian(embed, table, vectorize=True)
    assert by_loop.abs().max() > 0 and torch.allclose(by_vmap, by_loop, atol=1e-6)
