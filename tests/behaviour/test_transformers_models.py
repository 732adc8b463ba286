"""Small Siglip2 models of transformers under each mode: trained, saved, compiled and exported.

transformers' own tests of Siglip2 are not part of what it publishes; these go through the same uses
of a model.
"""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support import tiny_siglip2
from tests.support.checks import slow
from tests.support.oracles import OLD_TORCH, seeded, trained, worst
from timm_naflex_fast import enable, status

transformers = pytest.importorskip("transformers", minversion="5.21")
if not transformers.is_torch_available():
    pytest.skip("this transformers needs a newer torch", allow_module_level=True)
pytest.importorskip("transformers.models.siglip2.modeling_siglip2")
BEFORE_2_12 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
SIZES = [(3, 5), (7, 2), (4, 4), (3, 5)]


def batch(sizes=SIZES):
    length = max(h * w for h, w in sizes) + 2
    mask = torch.stack([torch.arange(length) < h * w for h, w in sizes]).long()
    pixels = torch.randn(len(sizes), length, 768, generator=seeded(1))
    shapes = torch.tensor(sizes)
    return dict(pixel_values=pixels, pixel_attention_mask=mask, spatial_shapes=shapes)


def run(model, inputs):
    return model(**inputs).pooler_output


def check(model, graph, inputs, want):
    """Trained, ``graph`` (the model, or its compiled form) gives the output and the gradients that
    are wanted."""
    got = trained(model, inputs, partial(run, graph))
    torch.testing.assert_close(got[0], want[0], atol=5e-6, rtol=5e-6)
    assert worst(got[1], want[1]) <= 2e-5


@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
def test_trains_like_transformers_saves_and_loads(mode, tmp_path):
    model = tiny_siglip2.tower(16)
    inputs = batch()
    want = trained(model, inputs, partial(run, model))
    with enable(mode, model=model):
        check(model, model, inputs, want)
        model.train()
        model.gradient_checkpointing_enable()
        check(model, model, inputs, want)
        assert set(status().calls) == {("pos_embed", mode)}
        assert status().fallbacks == {}

    with torch.no_grad(), enable(mode, library="transformers"):
        model.eval().save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
        assert list(loaded.state_dict()) == list(model.state_dict())
        got = run(loaded, inputs)
        assert status().calls == {("pos_embed", mode): 1}
    torch.testing.assert_close(got, want[0], atol=5e-6, rtol=0)


@pytest.mark.skipif(OLD_TORCH, reason="its compiler traces less")
@pytest.mark.parametrize(
    ("layers", "mode", "backend", "batches"),
    [
        (0, "matmul", "eager", 4),
        (0, "interpolate_cached", "eager", 1),
        slow(1, "matmul", "inductor", 1),
    ],
)
def test_one_graph_for_every_batch_length_and_grid(layers, mode, backend, batches):
    model = tiny_siglip2.tower(16, num_hidden_layers=layers)
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    various = [SIZES, [(2, 8), (3, 3), (5, 5)], [(9, 2)] * 5, [(1, 6), (4, 4)]]
    inputs = [batch(sizes) for sizes in various[:batches]]
    wanted = [trained(model, each, partial(run, model)) for each in inputs]
    # One enable() for all: before torch 2.15 another one lets the compiler forget its graphs.
    with enable(mode, library="transformers"):
        for each, want in zip(inputs, wanted):
            check(model, compiled, each, want)
        assert status().fallbacks == {}
    assert counter.frame_count <= 2


@pytest.mark.skipif(OLD_TORCH, reason="its export traces less")
@pytest.mark.skipif(
    BEFORE_2_12, reason="its export refuses transformers' own pooling head, unpatched too"
)
@pytest.mark.parametrize(("strict", "layers"), [(False, 0), slow(True, 1)])
@torch.no_grad()
def test_exported_program_takes_other_batches_lengths_and_grids(strict, layers):
    model = tiny_siglip2.tower(16, num_hidden_layers=layers)
    size = torch.export.Dim("size")
    free = {0: size, 1: torch.export.Dim("length")}
    shapes = dict(pixel_values=free, pixel_attention_mask=free, spatial_shapes={0: size})
    with enable(library="transformers"):
        exported = torch.export.export(model, (), batch(), dynamic_shapes=shapes, strict=strict)
        assert set(status().calls) == {("pos_embed", "matmul")}
    assert not [node for node in exported.graph.nodes if "upsample" in str(node.target)]
    program = exported.module()
    for sizes in (SIZES, [(2, 8), (3, 3), (9, 4)], [(1, 6), (4, 4)]):
        inputs = batch(sizes)
        torch.testing.assert_close(run(program, inputs), run(model, inputs), atol=5e-6, rtol=0)
