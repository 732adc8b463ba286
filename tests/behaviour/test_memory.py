"""Whose memory is whose: what is cached, what autograd gets."""

from functools import partial

import pytest
import torch

from tests.support.checks import by_functions
from tests.support.oracles import Case, relative, stock, tables
from tests.support.running import running
from timm_naflex_fast.functional import resample_pos_embeds
from timm_naflex_fast.resampling import kept

EXACT = ["matmul", "interpolate_cached"]


@pytest.mark.parametrize("moment", ["copied", "resized"])
@pytest.mark.parametrize("strategy", EXACT)
def test_a_write_while_a_table_is_resized_poisons_nothing(strategy, moment, monkeypatch):
    """Another thread exchanges the weights before the cache copies them, or after that and before
    it resizes them."""
    first, second = torch.randn(2, 6, 5, 4)
    table, without_autograd, left = first.clone(), kept.without_autograd, ["copied", "resized"]
    embed = lambda t=table: resample_pos_embeds(t, [(3, 4)], mode="bicubic", strategy=strategy)
    want, _ = embed(first), embed()

    def exchange():  # entered before anything is copied or built
        if left and left.pop(0) == moment:
            table.data.copy_(second)
        return without_autograd()

    monkeypatch.setattr(kept, "without_autograd", exchange)
    embed()
    monkeypatch.undo()
    assert not left and torch.equal(table, second)
    table.data.copy_(first)
    assert all(relative(embed(), want) <= 2e-6 for _ in range(3))


@pytest.mark.parametrize("strategy", EXACT)
@pytest.mark.parametrize("sizes", [[(6, 5)], [(6, 5)] * 3, [(3, 4)], [(3, 4), (2, 2)]])
@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_gradients_share_no_memory(strategy, sizes, kind):
    """A hook that changes one parameter's gradient in place, as clipping does, changes no other."""
    case, found = Case(sizes=sizes, length=30, kind=kind), []

    def halve(parameter):
        parameter.grad.mul_(0.5)

    for add in (stock, partial(by_functions, strategy=strategy)):
        embeds, x = case.embeds(), case.x().requires_grad_()
        for table in tables(embeds):
            table.register_post_accumulate_grad_hook(halve)
        y = x * 1
        y.retain_grad()
        add(case, embeds, y, case.coord())
        y.square().sum().backward()
        found.append([x.grad, y.grad, *(table.grad for table in tables(embeds))])
    assert all(relative(mine, theirs) <= 1e-5 for theirs, mine in zip(*found))
    assert len({t.untyped_storage().data_ptr() for t in found[1][1:]}) == len(found[1]) - 1


def test_the_gradient_of_many_grids_does_not_drift():
    """Equal contributions are the worst case: every rounding goes the same way."""
    sizes, found = [(h, 1) for h in range(1, 401)], []
    for dtype in (torch.float64, torch.float32):
        table = torch.zeros(4, 4, 1, dtype=dtype, requires_grad=True)
        upstream = torch.cat([torch.full((h * w, 1), 0.1 / (h * w), dtype=dtype) for h, w in sizes])
        found += torch.autograd.grad(
            resample_pos_embeds(table, sizes, mode="bilinear"), table, upstream
        )
    assert relative(found[1], found[0]) <= 1e-6


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_coordinates_and_tables_may_change_before_the_backward_pass(backend):
    """A loader fills its buffer again; an optimizer steps: a linear map needs neither."""
    case = Case(sizes=[(3, 4), (5, 2)], length=30)
    embeds, tokens, found = case.embeds(), torch.randn(2, 30, 1), []
    for mode in ("stock", "matmul"):
        buffer = case.coord()
        with running(mode):
            run = (
                embeds
                if mode == "stock"
                else torch.compile(embeds, backend=backend, fullgraph=True)
            )
            out = run(tokens, patch_coord=buffer)[0]
        buffer.zero_()
        with torch.no_grad():
            embeds.pos_embed.mul_(1)
        found.append(torch.autograd.grad(out.square().sum(), embeds.pos_embed)[0])
    assert relative(*found) <= 1e-5


def test_the_bound_of_the_cache():
    for text, valid in (("", 512), (None, 512), ("0", 0), (" 64 ", 64)):
        assert kept.read_limit(text) == valid * 2**20
    for text in ("abc", "0.5", "-5", "1e3", "64MiB", "²"):
        with pytest.raises(
            ValueError, match=r"_CACHE_MIB=.* is not valid; valid: a whole number of MiB"
        ):
            kept.read_limit(text)
