"""timm's loop as one function of 40 lines: what docs/in-timm.md says of it."""

import inspect

import pytest
import torch
from in_forty_lines import Module, add_pos_embed, make_embeds, measure
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

from tests.support.oracles import OLD_TORCH, STOCK, relative, row_major, seeded
from tests.support.running import ran

LOOP = STOCK["_apply_learned_naflex_pos_embed"]
SIZES = [(16, 16), (9, 28), (25, 10), (1, 40), (40, 1), (5, 7)]
IN_GRAPHS = pytest.mark.skipif(OLD_TORCH, reason="this torch's compiler and export trace less")


def tokens(coord, dtype=torch.float32):
    return torch.randn(*coord.shape[:2], 768, generator=seeded(1)).to(dtype)


def by_loop(embeds, x, coord):
    x = x * 1
    LOOP(embeds, x, coord)
    return x


def allowed(embeds):
    return 2e-6 * max(1, embeds.pos_embed.abs().max().item())


def test_it_has_at_most_40_lines():
    assert len(inspect.getsource(add_pos_embed).splitlines()) <= 40


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("ar_preserving", [False, True])
def test_it_adds_what_timms_loop_adds_with_its_gradients(mode, ar_preserving):
    embeds = make_embeds(mode)
    embeds.pos_embed_ar_preserving = ar_preserving
    coord = row_major(SIZES)
    x = tokens(coord)
    upstream = torch.randn(x.shape, generator=seeded(2))
    want = by_loop(embeds, x, coord)
    (want_gradient,) = torch.autograd.grad(want, embeds.pos_embed, upstream)

    got = x * 1
    with torch.autocast("cpu", torch.bfloat16):
        add_pos_embed(got, embeds.pos_embed, coord, mode == "bicubic", ar_preserving)

    torch.testing.assert_close(got, want, rtol=0, atol=allowed(embeds))
    (gradient,) = torch.autograd.grad(got, embeds.pos_embed, upstream)
    assert relative(gradient, want_gradient) <= 1e-5
    padding = torch.arange(x.shape[1]) >= (coord.amax(1, keepdim=True) + 1).prod(2)
    assert torch.equal(got[padding], x[padding])


@IN_GRAPHS
def test_one_graph_trains_on_every_batch_and_an_exported_program_serves_other_grids():
    embeds = make_embeds("bicubic")
    graphs = CompileCounterWithBackend("aot_eager")
    module = Module(embeds.pos_embed, True)
    compiled = torch.compile(module, backend=graphs, fullgraph=True, dynamic=True)
    dynamic = {0: Dim("batch", max=64), 1: Dim("length", max=1024)}
    coord = row_major(SIZES)
    program = torch.export.export(module, (tokens(coord), coord), dynamic_shapes=(dynamic,) * 2)
    for sizes in (SIZES, [(3, 9), (12, 12), (7, 2)]):
        coord = row_major(sizes)
        x = tokens(coord).requires_grad_()
        want = by_loop(embeds, x, coord)
        got = compiled(x, coord)
        got.sum().backward()
        for result in (got, program.module()(x, coord)):
            torch.testing.assert_close(result, want, rtol=0, atol=allowed(embeds))
    assert graphs.frame_count == 1


@ran("matmul")
def test_the_race_runs_everybody():
    rows = measure(batch=2, rounds=1)
    assert len(rows) == 16
    for row in rows:
        assert row["ms"] > 0
        is_equal = row["off"] <= 1e-5
        assert is_equal is (row["contender"] != "timm's flag")
