"""transformers' Siglip2: enabled by name or found in a model, the same result, and its own code again afterwards."""

import subprocess
import sys

import pytest
import torch
from oracles import relative, small_vit

from timm_naflex_fast import disable, enable, status

transformers = pytest.importorskip("transformers")
siglip2 = pytest.importorskip("transformers.models.siglip2.modeling_siglip2")
FORWARD = siglip2.Siglip2VisionEmbeddings.__dict__["forward"]
SIZES = [(3, 5), (7, 2), (4, 4), (3, 5), (1, 6)]
MODES = ["matmul", "interpolate_cached"]


@pytest.fixture
def model():
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.Siglip2VisionConfig(patch_size=4, num_patches=16, **sizes)
    model = transformers.Siglip2VisionModel(config).eval()
    torch.nn.init.normal_(embeddings(model).position_embedding.weight)
    return model


def embeddings(model):
    (found,) = [module for module in model.modules() if isinstance(module, siglip2.Siglip2VisionEmbeddings)]
    return found


def embed(model, sizes=SIZES):
    part = embeddings(model)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(len(sizes), 18, 48, generator=generator).to(part.patch_embedding.weight.dtype)
    return part(pixels, torch.tensor(sizes))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("own", [True, False])
def test_equals_transformers(model, mode, own):
    table = embeddings(model).position_embedding.weight
    want = embed(model)
    (want_grad,) = torch.autograd.grad(want.square().sum(), table)
    with enable(mode, model=model) if own else enable(mode, library="transformers"):
        with torch.no_grad():
            plain = embed(model)
        got = embed(model)
        (grad,) = torch.autograd.grad(got.square().sum(), table)
        assert status().calls == {("pos_embed", mode): 2} and status().fallbacks == {}
        assert embed(small_vit_like(model)).shape == got.shape
        assert ("pos_embed", "stock") in status().calls or not own  # another model keeps its own code
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    torch.testing.assert_close(plain, want, atol=2e-6, rtol=0)
    assert relative(grad, want_grad) <= 1e-5
    if mode == "interpolate_cached":
        assert torch.equal(got, want) and torch.equal(plain, want)
    assert siglip2.Siglip2VisionEmbeddings.__dict__["forward"] is FORWARD


def small_vit_like(model):
    return transformers.Siglip2VisionModel(model.config)


def test_width_one_is_right_where_transformers_is_wrong(model):
    part = embeddings(model)
    table = part.position_embedding.weight.detach().double().view(1, 4, 4, 32).permute(0, 3, 1, 2)
    layout = table.contiguous(memory_format=torch.channels_last)
    truth = torch.nn.functional.interpolate(layout, (6, 1), mode="bilinear", antialias=True)[0, :, :, 0].t()
    with torch.no_grad():
        part.patch_embedding.weight.zero_()
        part.patch_embedding.bias.zero_()
        with enable(library="transformers"):
            assert relative(embed(model, [(6, 1)])[0, :6], truth) <= 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_half_precision_is_one_cast_from_float32(model, mode):
    model.to(torch.bfloat16)
    with torch.no_grad():
        want = embed(model)
        with enable(mode, library="transformers"):
            got = embed(model)
    assert got.dtype == torch.bfloat16 and relative(got, want) <= 2**-7


def test_both_libraries_and_what_is_refused(model):
    with enable(library=("timm", "transformers")):
        replaced = status().replaced
        assert replaced["Siglip2VisionEmbeddings.forward"] == "matmul"
        assert replaced["NaFlexEmbeds._apply_learned_naflex_pos_embed"] == "matmul"
        with enable("interpolate_cached", library="transformers"):
            assert status().replaced["Siglip2VisionEmbeddings.forward"] == "interpolate_cached"
            assert status().replaced["NaFlexEmbeds._apply_learned_naflex_pos_embed"] == "matmul"
    assert status().replaced == {}
    with enable(model=small_vit()):
        assert "Siglip2VisionEmbeddings.forward" not in status().replaced
    valid = "valid: 'stock', 'interpolate_cached', 'matmul'"
    for wrong in (dict(library="transformers"), dict(library=("timm", "transformers")), dict(model=model)):
        with pytest.raises(ValueError, match=valid):
            enable("grid_sample", **wrong)
    with pytest.raises(ValueError, match=r"no timm NaFlexEmbeds and no transformers Siglip2VisionEmbeddings"):
        enable(model=torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="'vllm' is not valid for library; valid: 'timm', 'transformers'"):
        enable(library="vllm")
    assert siglip2.Siglip2VisionEmbeddings.__dict__["forward"] is FORWARD and status().replaced == {}
    disable()


def test_importing_and_enabling_timm_imports_no_transformers():
    program = """
import sys, timm_naflex_fast as fast
assert "timm" not in sys.modules and "transformers" not in sys.modules
fast.enable(); fast.status(); fast.disable()
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
