"""Whose memory is whose: what is kept, what autograd gets."""

from functools import partial

import pytest
import torch

from tests.support.checks import by_functions
from tests.support.oracles import Case, relative, tables
from tests.support.running import running
from timm_naflex_fast.functional import resample_pos_embeds
from timm_naflex_fast.resampling import kept

STRATEGIES = pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])


@pytest.mark.parametrize("writes_before", ["copying", "resizing"])
@STRATEGIES
def test_a_write_while_a_table_is_resized_poisons_nothing(strategy, writes_before, monkeypatch):
    """Another thread exchanges the weights before the cache copies them, or after that and before
    it resizes them."""
    first, second = torch.randn(2, 6, 5, 4)
    embed = partial(resample_pos_embeds, grid_sizes=[(3, 4)], mode="bicubic", strategy=strategy)
    want = embed(first)
    table = first.clone()
    embed(table)
    unseen = kept.unseen
    moments = ["copying", "resizing"]

    def write():  # called before anything is copied or built
        if moments and moments.pop(0) == writes_before:
            table.data.copy_(second)
        return unseen()

    with monkeypatch.context() as patch:
        patch.setattr(kept, "unseen", write)
        embed(table)
    assert moments == []
    assert torch.equal(table, second)

    table.data.copy_(first)
    for _ in range(3):
        assert relative(embed(table), want) <= 2e-6


@STRATEGIES
@pytest.mark.parametrize("sizes", [[(6, 5)], [(6, 5)] * 3, [(3, 4)], [(3, 4), (2, 2)]], ids=str)
@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_gradients_share_no_memory(strategy, sizes, kind):
    """What changes one parameter's gradient in place, as clipping does, changes no other."""
    case = Case(sizes=sizes, length=30, kind=kind)
    embeds = case.embeds()
    y = case.x().requires_grad_() * 1
    y.retain_grad()

    by_functions(case, embeds, y, case.coord(), strategy)
    y.square().sum().backward()

    grads = [y.grad, *(table.grad for table in tables(embeds))]
    assert len({grad.untyped_storage().data_ptr() for grad in grads}) == len(grads)


def test_the_gradient_of_many_grids_does_not_drift():
    """Equal contributions are the worst case: every rounding goes the same way."""
    heights = range(1, 401)

    def gradient(dtype):
        table = torch.zeros(4, 4, 1, dtype=dtype, requires_grad=True)
        packed = resample_pos_embeds(table, [(h, 1) for h in heights], mode="bilinear")
        upstream = torch.cat([torch.full((h, 1), 0.1 / h, dtype=dtype) for h in heights])
        return torch.autograd.grad(packed, table, upstream)[0]

    assert relative(gradient(torch.float32), gradient(torch.float64)) <= 1e-6


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_coordinates_and_tables_may_change_before_the_backward_pass(backend):
    """A loader fills its buffer again; an optimizer steps: a linear map needs neither."""
    case = Case(sizes=[(3, 4), (5, 2)], length=30)
    embeds = case.embeds()
    tokens = torch.randn(2, 30, 1)

    def gradient(mode, run):
        coord = case.coord()
        with running(mode):
            out = run(tokens, patch_coord=coord)[0]
        coord.zero_()
        with torch.no_grad():
            embeds.pos_embed.mul_(1)
        return torch.autograd.grad(out.square().sum(), embeds.pos_embed)[0]

    want = gradient("stock", embeds)
    got = gradient("matmul", torch.compile(embeds, backend=backend, fullgraph=True))
    assert relative(got, want) <= 1e-5
