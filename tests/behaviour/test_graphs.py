"""Whole models of both libraries, and embeddings from sizes, in one graph."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.checks import slow, written
from tests.support.oracles import NEW_TIMM, OLD_TORCH, far, relative, row_major, trained
from tests.support.running import running
from tests.support.whole_models import IMAGES, RUNS, batch_of, build
from timm_naflex_fast import enable, status
from timm_naflex_fast.functional import add_pos_embed_, resample_pos_embeds

# A model's name and depth, the mode, a compiler's backend, and how many batches it is asked for.
COMPILED = [
    ("learned, images", 0, "matmul", "eager", 4),
    slow("learned, images", 0, "interpolate_cached", "aot_eager", 4),
    ("learned", 0, "matmul", "aot_eager", 4),
    ("learned", 0, "interpolate_cached", "eager", 4),
    ("learned", 0, "grid_sample", "eager", 4),
    slow("learned", 1, "matmul", "inductor", 2),
    ("factorized", 0, "interpolate_cached", "eager", 4),
    slow("factorized", 1, "matmul", "inductor", 2),
    ("siglip2", 0, "matmul", "eager", 3),
    slow("siglip2", 0, "interpolate_cached", "eager", 1),
    slow("siglip2", 1, "matmul", "inductor", 1),
    *(("mixed", 1, "matmul", "eager", 2) for kind in RUNS if kind == "mixed"),
    *(slow(kind, 2, "matmul", "aot_eager", 2) for kind in RUNS),
]
BEFORE_2_12 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)


@pytest.mark.skipif(OLD_TORCH, reason="its compiler traces less")
@pytest.mark.parametrize(("name", "depth", "mode", "backend", "batches"), COMPILED)
def test_trains_in_one_graph_for_every_batch_length_and_grid(name, depth, mode, backend, batches):
    """Plain images in three; timm itself cannot: https://github.com/pytorch/pytorch/issues/197622."""
    if mode == "grid_sample" and not NEW_TIMM:
        pytest.skip("reads the largest grid")
    name, *images = name.split(", ")
    model = build(name, depth)
    inputs = IMAGES if images else [batch_of(name, number, 4) for number in range(batches)]
    with enable("grid_sample" if mode == "grid_sample" else "stock"):
        wants = [trained(model, batch) for batch in inputs]
    has_timms_bits = (name, mode, backend) == ("learned", "interpolate_cached", "eager")
    counter = CompileCounterWithBackend(backend)
    graph = torch.compile(model, backend=counter, fullgraph=True, dynamic=None if images else True)
    component = "rope" if name in RUNS else "pos_embed"
    # One enable() for all: before torch 2.15 another one lets the compiler forget its graphs.
    with running(mode, model=model, component=component, strict=True):
        for batch, want in zip(inputs, wants):
            got = trained(model, batch, graph)
            assert far(got, want) <= 2e-5
            assert torch.equal(got[0], want[0]) or not has_timms_bits
        assert status().fallbacks == {}
    assert counter.frame_count <= (3 if images else 2)


WRITTEN = [(kind, 1, False) for kind in RUNS]
if not BEFORE_2_12:  # whose export refuses transformers' own pooling head, unpatched too
    WRITTEN += [("siglip2", 0, False), slow("siglip2", 1, True)]


@pytest.mark.skipif(OLD_TORCH, reason="its export refuses to write in place")
@pytest.mark.parametrize(("name", "depth", "strict"), WRITTEN)
@torch.no_grad()
def test_what_is_written_down_holds_for_other_batches_lengths_and_grids(name, depth, strict):
    model = build(name, depth)
    batches = [batch_of(name, number, 2) for number in (0, 1, 3)]
    size, length = torch.export.Dim("size"), torch.export.Dim("length")
    shapes = {name: {0: size, 1: length} for name in batches[0]}
    if name == "siglip2":
        shapes["spatial_shapes"] = {0: size}
    how = dict(dynamic_shapes=(shapes,), strict=strict)
    with running(model=model, component="rope" if name in RUNS else "pos_embed"):
        exported = torch.export.export(model, (batches[0],), **how)
    assert not [node for node in exported.graph.nodes if "upsample" in str(node.target)]
    program = exported.module()
    for batch in batches:
        assert relative(program(batch), model(batch)) <= 5e-6


@pytest.mark.parametrize("fullgraph", [True, False])
def test_shapes_and_coordinates_are_checked_in_a_graph(fullgraph):
    add = torch.compile(add_pos_embed_, backend="eager", fullgraph=fullgraph)
    x = torch.zeros(4, 6, 4)
    coord = row_major([(2, 3)] * 4)
    table = torch.zeros(6, 5, 4)
    with pytest.raises(Exception, match=r"x must be tokens of shape \(B, N, 4\)"):
        add(x[..., :3], table, coord)
    for wrong in (coord[:, :5], coord[0], coord[:1], coord[:3]):
        with pytest.raises(Exception, match=r"patch_coord must hold .* shape \(4, 6, 2\)"):
            add(x, table, wrong)
    # By the operator: plain operations could not ask.
    with pytest.raises(ValueError, match="negative"):
        add(x, table, coord - 1)


class Embeds(torch.nn.Module):
    """Padded embeddings from sizes (t, h, w), and without frames."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(6, 5, 8))

    def forward(self, sizes):
        how = dict(mode="bilinear", merge=2, length=450)
        frames = resample_pos_embeds(self.table, sizes, padding="first", **how)
        images = resample_pos_embeds(self.table, sizes[:, 1:], padding="zeros", **how)
        return torch.stack((frames, images))


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
    model = Embeds()
    sizes = torch.tensor([(2, 4, 4), (1, 6, 6), (3, 2, 2)], dtype=getattr(torch, dtype))
    # More cells than 8 bits can count.
    other = torch.tensor([(1, 2, 2), (2, 2, 8), (1, 20, 20)], dtype=sizes.dtype)

    graph = written(how, model, sizes)

    for given in (sizes, other):
        check(graph(given), model(given), graph.table, model.table)
    if how == "trace":  # which holds no check
        return
    for long_empty_or_odd in ((22, 22), (0, 4), (2, 3), (3, 2)):
        other[1, 1:] = torch.tensor(long_empty_or_odd)
        with pytest.raises(RuntimeError, match="grid_sizes must be at least 1, multiples of merge"):
            graph(other)


@pytest.mark.parametrize(("strategy", "rounding"), [("matmul", 2e-6), ("interpolate_cached", 0)])
def test_packed_embeddings_from_sizes_in_one_graph(strategy, rounding):
    table = torch.randn(6, 5, 8, requires_grad=True)

    def embed(table):
        return resample_pos_embeds(table, [(3, 4), (7, 2)], mode="bicubic", strategy=strategy)

    graph = torch.compile(embed, backend="aot_eager", fullgraph=True)
    check(graph(table), embed(table), table, table, rounding)


@pytest.mark.skipif(OLD_TORCH, reason="its compiler cannot mark a size as unbacked")
@torch.no_grad()
def test_a_number_of_tokens_of_which_the_compiler_knows_nothing():
    """As vLLM marks the tokens of a vision encoder."""
    from torch._dynamo.decorators import mark_unbacked

    model = build("learned", depth=0)
    batches = batch_of("learned", 0), batch_of("learned", 2)
    wants = [model(batch) for batch in batches]
    with running(strict=True):
        graph = torch.compile(model, backend="eager", fullgraph=True)
        for batch, want in zip(batches, wants, strict=True):
            for tensor in batch.values():
                mark_unbacked(tensor, 1)
            assert relative(graph(batch), want) <= 1e-5
        batch["patch_coord"] = batch["patch_coord"][:, 1:].clone()
        mark_unbacked(batch["patch_coord"], 1)
        with pytest.raises(ValueError, match="patch_coord must hold"):
            graph(batch)
