"""Whose memory is whose: what is cached, what autograd gets."""

import pytest
import torch

from tests.support.oracles import Case, relative, tables
from tests.support.running import running
from timm_naflex_fast.functional import resample_pos_embeds
from timm_naflex_fast.resampling import cache

EXACT = ["matmul", "interpolate_cached"]


def case_of(kind="learned", sizes=((6, 5),), **more):
    return Case(sizes=list(sizes), length=30, kind=kind, **more)


def add(embeds, case, x=None):
    x = torch.zeros(len(case.sizes), case.length, case.channels) if x is None else x
    getattr(embeds, f"_apply_{case.kind}_naflex_pos_embed")(x, patch_coord=case.coord())
    return x


@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("size", [(6, 5), (6, 3), (3, 5), (4, 4)])
def test_what_is_cached_owns_its_memory(kind, mode, size):
    case = case_of(kind, [size])
    embeds = case.embeds().requires_grad_(False)
    want = add(embeds, case)
    with running(mode):
        for _ in range(3):
            add(embeds, case)
        for parameter in tables(embeds):
            old, parameter.data = parameter.data, parameter.data.clone()
            old.zero_()  # the old memory is used again
        assert relative(add(embeds, case), want) <= 2e-6


@pytest.mark.parametrize("strategy", EXACT)
def test_a_write_while_a_table_is_resized_poisons_nothing(strategy, monkeypatch):
    """Another thread exchanges the weights after they were compared, and before they are resized."""
    table = torch.randn(6, 5, 4)
    first, second = table.clone(), torch.randn(6, 5, 4)
    embed = lambda t=table: resample_pos_embeds(t, [(3, 4)], mode="bicubic", strategy=strategy)
    want = {id(t): embed(t) for t in (first, second)}
    embed()
    compare, no_modes = cache._same_bits, cache.no_modes

    def exchange():
        table.data.copy_(second)
        return no_modes()

    monkeypatch.setattr(cache, "no_modes", exchange)  # entered before anything is copied or built
    embed(), embed()
    monkeypatch.undo()
    table.data.copy_(first)
    for _ in range(3):
        assert relative(embed(), want[id(first)]) <= 2e-6
    monkeypatch.setattr(cache, "_same_bits", lambda *a: (compare(*a), table.data.copy_(second))[0])
    embed()  # compared, then exchanged
    monkeypatch.undo()
    for _ in range(2):
        assert relative(embed(), want[id(second)]) <= 2e-6


def halve(parameter):
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("sizes", [[(6, 5)], [(6, 5)] * 3, [(3, 4)], [(3, 4), (2, 2)]])
@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_gradients_share_no_memory(mode, sizes, kind):
    """A hook that changes one parameter's gradient in place, as clipping does, changes no other."""
    found = []
    for on in (False, True):
        case = case_of(kind, sizes)
        embeds, x = case.embeds(), case.x().requires_grad_()
        for table in tables(embeds):
            table.register_post_accumulate_grad_hook(halve)
        y = x * 1
        y.retain_grad()
        with running(mode if on else "stock"):
            add(embeds, case, y).square().sum().backward()
        found.append([x.grad, y.grad, *(table.grad for table in tables(embeds))])
    for theirs, mine in zip(*found):
        assert relative(mine, theirs) <= 1e-5
    _, *mine = found[1]
    assert len({t.untyped_storage().data_ptr() for t in mine}) == len(mine)


def test_the_gradient_of_many_grids_does_not_drift():
    sizes = [(1 + i % 40, 1 + i // 40) for i in range(1600)]
    table = torch.randn(4, 4, 1)
    found = []
    for dtype in (torch.float64, torch.float32):
        leaf = table.to(dtype).requires_grad_()
        out = resample_pos_embeds(leaf, sizes, mode="bilinear")
        found.append(torch.autograd.grad(out, leaf, torch.full_like(out, 0.1))[0])
    assert relative(found[1], found[0]) <= 3e-6


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_coordinates_and_tables_may_change_before_the_backward_pass(backend):
    """A loader fills its buffer again; an optimizer steps: a linear map needs neither."""
    case = case_of(sizes=[(3, 4), (5, 2)])
    embeds, coord, found = case.embeds(), case.coord(), []
    for mode in ("stock", "matmul"):
        buffer, tokens = coord.clone(), torch.randn(2, 30, 1, generator=torch.Generator().manual_seed(0))
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
    message = r"TIMM_NAFLEX_FAST_CACHE_MIB=.* is not valid; valid: a whole number of MiB"
    for text in ("abc", "0.5", "-5", "1e3", "64MiB", "²"):
        with pytest.raises(ValueError, match=message):
            cache.read_limit(text)
