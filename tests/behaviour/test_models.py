"""Whole NaFlexVits and their embeddings under each strategy, against unpatched timm.

Also with fake tensors.
"""

import pytest
import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.oracles import (
    NEW_TIMM,
    far,
    first,
    relative,
    small_vit,
    trained,
    vit_batch,
)
from tests.support.running import running
from timm_naflex_fast import enable, status

RADIO = {
    "pos_embed_grid_size": (128, 128),
    "pos_embed_interp_mode": "bilinear",
    "pos_embed_ar_preserving": True,
    "class_token": True,
    "reg_tokens": 4,
}
if NEW_TIMM:
    RADIO |= {"pos_embed_antialias": False, "pos_embed_align_corners": True}
MODELS = {"siglip": {}, "gap": RADIO, "parfac_gap": {}}
PATCHES = vit_batch([(12, 21), (16, 16), (9, 28), (21, 12), (9, 28)], patch=16, chans=3)
IMAGES = torch.randn(2, 3, 208, 272)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    small = dict(depth=1, embed_dim=192, num_heads=3, num_classes=0)
    name = f"naflexvit_base_patch16_{request.param}"
    return timm.create_model(name, **small, **MODELS[request.param]).eval()


@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
@pytest.mark.parametrize("inputs", [PATCHES, IMAGES], ids=["naflex", "images"])
def test_outputs_and_gradients_equal_stock(model, mode, inputs):
    want = trained(model, inputs)
    with running(mode):
        assert far(trained(model, inputs), want) <= 1e-5
        with torch.no_grad():
            for _ in range(3):  # at last from the cache
                assert relative(model(inputs), want[0]) <= 1e-5
    _, grads = want
    assert max(grads[name].abs().max() for name in grads if "pos_embed" in name) > 1e-7


@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_images_of_another_number_of_tokens_are_refused_unchanged(kind, mode):
    embeds = small_vit(pos_embed=kind).embeds
    for tokens in (1, 5, 7):
        x = torch.zeros(2, tokens, embeds.embed_dim)
        with pytest.raises(RuntimeError):  # timm's own
            getattr(embeds, f"_apply_{kind}_pos_embed")(x.clone(), (2, 3))
        refused = pytest.raises(ValueError, match="one token per cell of the 2 x 3 grid")
        with enable(mode), refused:
            getattr(embeds, f"_apply_{kind}_pos_embed")(x, (2, 3))
        assert not x.any()


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
def test_fake_tensors_work_and_poison_nothing(mode):
    embeds = small_vit(enable_patch_interpolator=True).embeds.requires_grad_(False)
    weight = embeds.proj.weight
    image = torch.randn(2, 1, 24, 28)

    def tokens(image):
        return first(embeds(image))

    def kernel(weight):
        return embeds.patch_interpolator.resample_linear_weight(weight, (3, 5))

    want = tokens(image)
    want_kernel = kernel(weight)

    enable(mode)
    for _ in range(2):
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            assert tokens(fake.from_tensor(image)).shape == want.shape
            assert kernel(fake.from_tensor(weight)).shape == want_kernel.shape
        graph = make_fx(tokens, tracing_mode="fake", _allow_non_fake_inputs=True)(image)
        for run in (graph, tokens):
            torch.testing.assert_close(run(image), want, atol=2e-6, rtol=0)
        torch.testing.assert_close(kernel(weight), want_kernel, atol=5e-6, rtol=0)
    assert set(status().calls) == {("pos_embed", mode), ("patch_embed", "matmul")}
