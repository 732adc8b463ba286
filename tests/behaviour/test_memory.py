"""Whose memory is whose: what is cached, what autograd gets."""

import pytest
import torch

from tests.support.oracles import Case, relative, tables
from tests.support.running import running
from timm_naflex_fast.functional import resample_pos_embeds
from timm_naflex_fast.resampling import cache

EXACT = ["matmul", "interpolate_cached"]


def add(embeds, case, x):
    getattr(embeds, f"_apply_{case.kind}_naflex_pos_embed")(x, patch_coord=case.coord())
    return x


@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("size", [(6, 5), (6, 3), (3, 5), (4, 4)])
def test_what_is_cached_owns_its_memory(kind, mode, size):
    case = Case(sizes=[size], length=30, kind=kind)
    embeds = case.embeds().requires_grad_(False)
    embed = lambda: add(embeds, case, torch.zeros(1, 30, 4))
    want = embed()
    with running(mode):
        for _ in range(3):
            embed()
        for parameter in tables(embeds):
            old, parameter.data = parameter.data, parameter.data.clone()
            old.zero_()  # the old memory is used again
        assert relative(embed(), want) <= 2e-6


@pytest.mark.parametrize("strategy", EXACT)
def test_a_write_while_a_table_is_resized_poisons_nothing(strategy, monkeypatch):
    """Another thread exchanges the weights after they were compared, and before they are resized."""
    table = torch.randn(6, 5, 4)
    first, second = table.clone(), torch.randn(6, 5, 4)
    embed = lambda t=table: resample_pos_embeds(t, [(3, 4)], mode="bicubic", strategy=strategy)
    want_first, want_second, _ = embed(first), embed(second), embed()
    compare, no_modes = cache._same_bits, cache.no_modes

    def exchange():
        table.data.copy_(second)
        return no_modes()

    monkeypatch.setattr(cache, "no_modes", exchange)  # entered before anything is copied or built
    embed(), embed()
    monkeypatch.undo()
    table.data.copy_(first)
    for _ in range(3):
        assert relative(embed(), want_first) <= 2e-6
    monkeypatch.setattr(cache, "_same_bits", lambda *a: (compare(*a), table.data.copy_(second))[0])
    embed()  # compared, then exchanged
    monkeypatch.undo()
    for _ in range(2):
        assert relative(embed(), want_second) <= 2e-6


@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("sizes", [[(6, 5)], [(6, 5)] * 3, [(3, 4)], [(3, 4), (2, 2)]])
@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_gradients_share_no_memory(mode, sizes, kind):
    """A hook that changes one parameter's gradient in place, as clipping does, changes no other."""

    def halve(parameter):
        parameter.grad.mul_(0.5)

    found = []
    for who in ("stock", mode):
        case = Case(sizes=sizes, length=30, kind=kind)
        embeds, x = case.embeds(), case.x().requires_grad_()
        for table in tables(embeds):
            table.register_post_accumulate_grad_hook(halve)
        y = x * 1
        y.retain_grad()
        with running(who):
            add(embeds, case, y).square().sum().backward()
        found.append([x.grad, y.grad, *(table.grad for table in tables(embeds))])
    for theirs, mine in zip(*found):
        assert relative(mine, theirs) <= 1e-5
    assert len({t.untyped_storage().data_ptr() for t in found[1][1:]}) == len(found[1]) - 1


def test_the_gradient_of_many_grids_does_not_drift():
    """Equal contributions are the worst case: every rounding goes the same way."""
    sizes, found = [(h, 1) for h in range(1, 401)], []
    for dtype in (torch.float64, torch.float32):
        table = torch.zeros(4, 4, 1, dtype=dtype, requires_grad=True)
        upstream = torch.cat([torch.full((h * w, 1), 0.1 / (h * w), dtype=dtype) for h, w in sizes])
        found += torch.autograd.grad(resample_pos_embeds(table, sizes, mode="bilinear"), table, upstream)
    assert relative(found[1], found[0]) <= 1e-6


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_coordinates_and_tables_may_change_before_the_backward_pass(backend):
    """A loader fills its buffer again; an optimizer steps: a linear map needs neither."""
    case = Case(sizes=[(3, 4), (5, 2)], length=30)
    embeds, tokens, found = case.embeds(), torch.randn(2, 30, 1), []
    for mode in ("stock", "matmul"):
        buffer = case.coord()
        with running(mode):
            run = embeds if mode == "stock" else torch.compile(embeds, backend=backend, fullgraph=True)
            out = run(tokens, patch_coord=buffer)[0]
        buffer.zero_()
        with torch.no_grad():
            embeds.pos_embed.mul_(1)
        found.append(torch.autograd.grad(out.square().sum(), embeds.pos_embed)[0])
    assert relative(*found) <= 1e-5


def test_the_bound_of_the_cache():
    for text, valid in (("", 512), (None, 512), ("0", 0), (" 64 ", 64)):
        assert cache.read_limit(text) == valid * 2**20
    for text in ("abc", "0.5", "-5", "1e3", "64MiB", "²"):
        with pytest.raises(
            ValueError, match=r"TIMM_NAFLEX_FAST_CACHE_MIB=.* is not valid; valid: a whole number of MiB"
        ):
            cache.read_limit(text)
