"""Whole NaFlexVits, and embeddings from sizes, in one compiled graph."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.checks import slow, written
from tests.support.oracles import (
    BATCH,
    OLD_TORCH,
    far,
    relative,
    row_major,
    small_vit,
    trained,
    vit_batch,
)
from tests.support.running import running
from timm_naflex_fast import enable
from timm_naflex_fast.functional import add_pos_embed_, resample_pos_embeds
from timm_naflex_fast.names import STRATEGY_NAMES


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_inductor_forward_and_backward(kind):
    model = small_vit(pos_embed=kind, depth=1)
    batches = BATCH, vit_batch([(2, 9), (7, 3)])
    wants = [trained(model, batch) for batch in batches]
    with running():
        run = torch.compile(model, fullgraph=True)
        for batch, want in zip(batches, wants, strict=True):
            assert far(trained(model, batch, run), want) <= 1e-5


@pytest.mark.parametrize("fullgraph", [True, False])
def test_shapes_and_coordinates_are_checked_in_a_graph(fullgraph):
    add = torch.compile(add_pos_embed_, backend="aot_eager", fullgraph=fullgraph)
    coord = row_major([(2, 3)])
    table = torch.zeros(6, 5, 4)
    with pytest.raises(Exception, match=r"x must be tokens of shape \(B, N, 4\)"):
        add(torch.zeros(1, 6, 3), table, coord)
    with pytest.raises(Exception, match=r"patch_coord must hold \(y, x\) for each token"):
        add(torch.zeros(1, 7, 4), table, coord)
    # By the operator: plain operations could not ask.
    with pytest.raises(ValueError, match="negative"):
        add(torch.zeros(1, 6, 4), table, coord - 1)


@pytest.mark.skipif(OLD_TORCH, reason="its compiler traces less")
@pytest.mark.parametrize("mode", STRATEGY_NAMES)
def test_plain_images_of_every_size_are_trained_in_three_graphs_at_most(mode):
    """timm's own code cannot: https://github.com/pytorch/pytorch/issues/197622."""
    model = small_vit(depth=0, pos_embed_interp_mode="bicubic")
    sizes = (24, 28), (40, 20), (32, 32), (64, 4)
    images = [torch.randn(count, 1, *size) for count, size in zip((2, 3, 5, 2), sizes)]
    wants = [trained(model, image) for image in images]
    counter = CompileCounterWithBackend("aot_eager")
    graph = torch.compile(model, backend=counter, fullgraph=True)
    with enable(mode, strict=True):
        for image, want in zip(images, wants, strict=True):
            assert far(trained(model, image, graph), want) <= 1e-5
    assert counter.frame_count <= 3


class Embeds(torch.nn.Module):
    """Padded embeddings from sizes (t, h, w), and without frames."""

    def __init__(self, length):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(6, 5, 8))
        self.length = length

    def forward(self, sizes):
        how = dict(mode="bilinear", merge=2, length=self.length)
        found = []
        for some in (sizes, sizes[:, 1:]):
            for padding in ("zeros", "first"):
                found.append(resample_pos_embeds(self.table, some, padding=padding, **how))
        return torch.stack(found)


def check(got, want, got_table, want_table, rounding=2e-6):
    """The values, and the gradients of the tables."""
    torch.testing.assert_close(got, want, atol=rounding, rtol=0)
    weight = torch.randn_like(want)
    (got_grad,) = torch.autograd.grad((got * weight).sum(), got_table, retain_graph=True)
    (want_grad,) = torch.autograd.grad((want * weight).sum(), want_table, retain_graph=True)
    torch.testing.assert_close(got_grad, want_grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["int64", *map(slow, ("uint8", "int8", "int16", "int32"))])
@pytest.mark.parametrize("how", ["compile", "export", "trace"])
def test_padded_embeddings_from_sizes_in_one_graph(how, dtype):
    model = Embeds(length=450)
    sizes = torch.tensor([(2, 4, 4), (1, 6, 6), (3, 2, 2)], dtype=getattr(torch, dtype))
    # More cells than 8 bits can count.
    other = torch.tensor([(1, 2, 2), (2, 2, 8), (1, 20, 20)], dtype=sizes.dtype)

    graph = written(how, model, sizes)

    for given in (sizes, other):
        check(graph(given), model(given), graph.table, model.table)


@pytest.mark.parametrize("how", ["compile", slow("export")])
def test_sizes_that_do_not_fit_are_noticed_in_a_graph(how):
    graph = written(how, Embeds(length=20), torch.tensor([(1, 2, 4), (1, 4, 4)]))
    for long_empty_or_odd in ((6, 4), (0, 4), (2, 3), (3, 2)):
        bad = torch.tensor([(1, 2, 4), (1, *long_empty_or_odd)])
        with pytest.raises(RuntimeError, match="grid_sizes must be at least 1, multiples of merge"):
            graph(bad)


@pytest.mark.parametrize(("strategy", "rounding"), [("matmul", 2e-6), ("interpolate_cached", 0)])
def test_packed_embeddings_from_sizes_in_one_graph(strategy, rounding):
    table = torch.randn(6, 5, 8, requires_grad=True)

    def embed(table):
        how = dict(grid_sizes=[(3, 4), (7, 2)], mode="bicubic", strategy=strategy)
        return [resample_pos_embeds(table, length=length, **how) for length in (None, 15)]

    graph = torch.compile(embed, backend="aot_eager", fullgraph=True)

    for got, want in zip(graph(table), embed(table), strict=True):
        check(got, want, table, table, rounding)


@pytest.mark.skipif(OLD_TORCH, reason="its compiler cannot mark a size as unbacked")
@torch.no_grad()
def test_a_number_of_tokens_of_which_the_compiler_knows_nothing():
    """As vLLM marks the tokens of a vision encoder."""
    from torch._dynamo.decorators import mark_unbacked

    model = small_vit(depth=1)
    batches = vit_batch([(4, 6), (7, 3)]), vit_batch([(3, 20), (9, 9)])
    wants = [model(batch) for batch in batches]
    with running(strict=True):
        graph = torch.compile(model, backend="eager", fullgraph=True)
        for batch, want in zip(batches, wants, strict=True):
            for tensor in batch.values():
                mark_unbacked(tensor, 1)
            assert relative(graph(batch), want) <= 1e-5
        batch["patch_coord"] = batch["patch_coord"][:, 1:].clone()
        mark_unbacked(batch["patch_coord"], 1)
        # Our check says it when the graph runs, or PyTorch's own guard (2.15) before.
        with pytest.raises((AssertionError, RuntimeError), match="patch_coord"):
            graph(batch)
