"""A method that the library's own code calls and ours skips: a subclass's, a patch's, a hook's effect stays."""

from unittest import mock

import pytest
import torch
from timm.layers.patch_embed import PatchEmbedInterpolator
from timm.models.naflexvit import NaFlexVitCfg

from tests.support.oracles import BATCH, small_vit
from timm_naflex_fast import enable, status


class Tripled(PatchEmbedInterpolator):
    def resample_linear_weight(self, weight, size):
        return 3 * super().resample_linear_weight(weight, size)


@pytest.mark.parametrize("how", ["subclass", "instance", "hook"])
@pytest.mark.parametrize("frozen", [True, False])
def test_patch_kernels(how, frozen):
    plain, patches = PatchEmbedInterpolator((16, 16), 3, 5), torch.randn(1, 4, 8, 8, 3)
    tripled = (Tripled if how == "subclass" else PatchEmbedInterpolator)((16, 16), 3, 5)
    if how == "instance":
        own = tripled.resample_linear_weight
        tripled.resample_linear_weight = lambda weight, size: 3 * own(weight, size)
    elif how == "hook":
        if not hasattr(tripled, "resampler"):
            pytest.skip("this timm has no resampler")
        tripled.resampler.register_forward_hook(lambda module, args, out: 3 * out)
    weight = torch.randn(5, 768, requires_grad=not frozen)
    want = tripled(patches, weight, None, (8, 8))
    assert torch.allclose(want, 3 * plain(patches, weight, None, (8, 8)), rtol=1e-4, atol=1e-4)
    plain.register_forward_hook(lambda *_: None)  # its own hooks run as ever
    with enable():
        for _ in range(2):
            assert torch.allclose(tripled(patches, weight, None, (8, 8)), want, rtol=1e-4, atol=1e-4)
        before = status().calls["patch_embed", "matmul"]
        assert before >= 2  # what another's method calls in the end is ours
        plain(patches, weight, None, (8, 8))
        assert status().calls["patch_embed", "matmul"] == before + 1


@pytest.mark.skipif(not hasattr(NaFlexVitCfg, "rope_type"), reason="this timm's NaFlexVit has no rotary embeddings")
def test_rotary_embeddings():
    model = small_vit(rope_type="axial")
    want, cls = model(BATCH), type(model.rope)
    name = "get_batch_embeds" if hasattr(cls, "get_batch_embeds") else "get_embed"
    with mock.patch.object(cls, name, autospec=True, side_effect=getattr(cls, name)) as spy, enable():
        assert torch.allclose(model(BATCH), want, atol=1e-5)
        assert spy.called and status().calls["rope", "stock"] == 1


def test_transformers():
    transformers = pytest.importorskip("transformers")
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    class Tripling(Siglip2VisionEmbeddings):
        @staticmethod
        def resize_positional_embeddings(*args, **kwargs):
            return 3 * Siglip2VisionEmbeddings.resize_positional_embeddings(*args, **kwargs)

    config = transformers.Siglip2VisionConfig(num_patches=16, hidden_size=32, patch_size=4)
    pixels, sizes = torch.randn(2, 20, 48), torch.tensor([(3, 4), (4, 5)])
    for cls, impl in ((Tripling, "stock"), (Siglip2VisionEmbeddings, "matmul")):
        tower = cls(config)
        want = tower(pixels, sizes)
        with enable(library="transformers"):
            assert torch.allclose(tower(pixels, sizes), want, atol=1e-5)
            assert status().calls == {("pos_embed", impl): 1}
