"""Small Siglip2 models of transformers under each mode: trained, saved, compiled and exported.

transformers' own tests of Siglip2 are not part of what it publishes; these go through the same uses
of a model.
"""

from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.checks import slow
from tests.support.oracles import OLD_TORCH, trained, worst
from timm_naflex_fast import disable, enable, status

transformers = pytest.importorskip("transformers", minversion="5.21")
if not transformers.is_torch_available():
    pytest.skip("this transformers needs a newer torch", allow_module_level=True)
pytest.importorskip("transformers.models.siglip2.modeling_siglip2")
BEFORE_2_12 = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
TOWER = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
SIZES = [(3, 5), (7, 2), (4, 4), (3, 5)]


def made(kind, **tower):
    vision = transformers.Siglip2VisionConfig(patch_size=4, num_patches=16, **TOWER | tower)
    text = dict(vocab_size=50, max_position_embeddings=8, projection_size=32, **TOWER)
    both = transformers.Siglip2Config(
        text_config=text, vision_config=vision.to_dict(), num_labels=5
    )
    torch.manual_seed(0)
    cls = {"vision": "VisionModel", "both": "Model", "labels": "ForImageClassification"}[kind]
    model = getattr(transformers, f"Siglip2{cls}")(vision if kind == "vision" else both)
    (table,) = [
        p for name, p in model.named_parameters() if "text" not in name and p.shape[0] == 16
    ]
    torch.nn.init.normal_(table)
    return model.eval()


def batch(kind="vision", sizes=SIZES):
    length = max(h * w for h, w in sizes) + 2
    mask = torch.stack([torch.arange(length) < h * w for h, w in sizes]).long()
    pixels = torch.randn(len(sizes), length, 48, generator=torch.Generator().manual_seed(1))
    words = dict(input_ids=torch.arange(16).view(2, 8)) if kind == "both" else {}
    return dict(
        pixel_values=pixels, pixel_attention_mask=mask, spatial_shapes=torch.tensor(sizes), **words
    )


def run(kind, model, inputs):
    return model(**inputs)[
        {"vision": "pooler_output", "both": "logits_per_image", "labels": "logits"}[kind]
    ]


def same(kind, model, inputs, want, graph=None):
    """Trained, the model (or the compiled ``graph`` of it) gives the output and the gradients that
    are wanted."""
    got = trained(model, inputs, partial(run, kind, model if graph is None else graph))
    torch.testing.assert_close(got[0], want[0], atol=5e-6, rtol=5e-6)
    assert worst(got[1], want[1]) <= 2e-5


@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
@pytest.mark.parametrize("kind", ["vision", "both", "labels"])
def test_trains_like_transformers_saves_and_loads(kind, mode, tmp_path):
    model = made(kind)
    inputs = batch(kind)
    names = list(model.state_dict())
    want = trained(model, inputs, partial(run, kind, model))
    with enable(mode, model=model):
        same(kind, model, inputs, want)
        assert status().calls == {("pos_embed", mode): 1}
        assert status().fallbacks == {}
        model.train()
        model.gradient_checkpointing_enable()
        same(kind, model, inputs, want)
    assert status().replaced == {}
    with torch.no_grad(), enable(mode, library="transformers"):
        model.eval().save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path).eval()
        assert list(loaded.state_dict()) == names
        torch.testing.assert_close(
            run(kind, loaded, inputs), run(kind, model, inputs), atol=1e-6, rtol=0
        )
        assert status().calls == {("pos_embed", mode): 2}
        disable()
        torch.testing.assert_close(run(kind, loaded, inputs), want[0], atol=5e-6, rtol=0)


@pytest.mark.skipif(OLD_TORCH, reason="its compiler traces less")
@pytest.mark.parametrize(
    ("kind", "layers", "mode", "backend", "shapes"),
    [
        ("vision", 0, "matmul", "eager", 4),
        ("vision", 0, "interpolate_cached", "eager", 1),
    ]
    + [slow("labels", 1, "matmul", "eager", 4), slow("vision", 1, "matmul", "inductor", 1)],
)
def test_one_graph_for_every_batch_length_and_grid(kind, layers, mode, backend, shapes):
    model = made(kind, num_hidden_layers=layers)
    counter = CompileCounterWithBackend(backend)
    sizes = [SIZES, [(2, 8), (3, 3), (5, 5)], [(9, 2)] * 5, [(1, 6), (4, 4)]][:shapes]
    batches = [batch(kind, each) for each in sizes]
    wants = [trained(model, inputs, partial(run, kind, model)) for inputs in batches]
    with enable(mode, library="transformers"):
        compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
        for inputs, want in zip(batches, wants):
            same(kind, model, inputs, want, compiled)
        assert set(status().calls) == {("pos_embed", mode)}
        assert status().fallbacks == {}
    assert counter.frame_count <= 2


@pytest.mark.skipif(OLD_TORCH, reason="its export traces less")
@pytest.mark.skipif(
    BEFORE_2_12, reason="its export refuses transformers' own pooling head, unpatched too"
)
@pytest.mark.parametrize(("strict", "layers"), [(False, 0), slow(True, 1)])
def test_exported_program_takes_other_batches_lengths_and_grids(strict, layers):
    model = made("vision", num_hidden_layers=layers)
    size = torch.export.Dim("size")
    length = torch.export.Dim("length")
    free = {0: size, 1: length}
    shapes = dict(pixel_values=free, pixel_attention_mask=free, spatial_shapes={0: size})
    with torch.no_grad():
        with enable(library="transformers"):
            program = torch.export.export(
                model, (), batch(), dynamic_shapes=shapes, strict=strict
            ).module()
            assert set(status().calls) == {("pos_embed", "matmul")}
            assert not [node for node in program.graph.nodes if "upsample" in str(node.target)]
        for sizes in (SIZES, [(2, 8), (3, 3), (9, 4)], [(1, 6), (4, 4)]):
            got, want = (run("vision", each, batch(sizes=sizes)) for each in (program, model))
            torch.testing.assert_close(got, want, atol=5e-6, rtol=0)
