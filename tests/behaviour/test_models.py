"""Whole NaFlexVits and their embeddings under each strategy, against unpatched timm.

Also with fake tensors and empty batches.
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
    row_major,
    small_vit,
    tables,
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
COORD = row_major([(2, 3)])
# timm's grid_sample flag is for NaFlex batches, so plain images are left to timm.
ON_IMAGES = {"matmul": "matmul", "interpolate_cached": "interpolate_cached", "grid_sample": "stock"}
PATCHES = vit_batch([(12, 21), (16, 16), (9, 28), (21, 12), (9, 28)], patch=16, chans=3)
IMAGES = torch.randn(2, 3, 208, 272)


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    small = dict(depth=1, embed_dim=192, num_heads=3)
    name = f"naflexvit_base_patch16_{request.param}"
    return timm.create_model(name, **small, **MODELS[request.param]).eval()


def step(model, inputs, mode):
    """Pooled features and all gradients of one forward and backward."""

    def pooled(inputs):
        features = model.forward_features(*inputs)
        if isinstance(features, dict):
            features = features["patches"]
        valid = inputs[2] if len(inputs) > 1 else None
        return model.forward_head(features, patch_valid=valid, pre_logits=True)

    with running(mode):
        return trained(model, inputs, pooled)


@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
@pytest.mark.parametrize("inputs", [tuple(PATCHES.values()), (IMAGES,)], ids=["naflex", "images"])
def test_outputs_and_gradients_equal_stock(model, mode, inputs):
    want = step(model, inputs, "stock")
    assert far(step(model, inputs, mode), want) <= 1e-5
    _, grads = want
    assert max(grads[name].abs().max() for name in grads if "pos_embed" in name) > 1e-7


@torch.no_grad()
@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
def test_kept_embeddings_of_images_equal_stock(model, mode):
    want = first(model.embeds(IMAGES))
    with running(mode):
        for _ in range(3):  # at last from the cache
            assert relative(first(model.embeds(IMAGES)), want) <= 1e-6


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("mode", ON_IMAGES)
@pytest.mark.parametrize("inside", ["fake", "make_fx"])
def test_fake_tensors_work_and_poison_nothing(mode, inside):
    embeds = small_vit(enable_patch_interpolator=True).embeds.requires_grad_(False)
    image = torch.randn(2, 1, 24, 28)
    patches = torch.randn(1, 6, 3, 5, 1)
    want = first(embeds(image))
    want_patches = first(embeds(patches, patch_coord=COORD))

    def with_fake_tensors():
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            assert first(embeds(fake.from_tensor(image))).shape == want.shape
            weight = fake.from_tensor(embeds.proj.weight)
            kernel = embeds.patch_interpolator.resample_linear_weight(weight, (3, 5))
            assert kernel.shape == (32, 15)

    def with_make_fx():
        how = dict(tracing_mode="fake", _allow_non_fake_inputs=True)
        graph = make_fx(lambda x: first(embeds(x)), **how)(image)
        torch.testing.assert_close(graph(image), want, atol=2e-6, rtol=0)

    enable(mode)
    for _ in range(2):
        if inside == "fake":
            with_fake_tensors()
        else:
            with_make_fx()
        torch.testing.assert_close(first(embeds(image)), want, atol=5e-6, rtol=0)
    if mode != "grid_sample":
        got = first(embeds(patches, patch_coord=COORD))
        torch.testing.assert_close(got, want_patches, atol=5e-6, rtol=0)
    assert ("pos_embed", ON_IMAGES[mode]) in status().calls
    if inside == "fake":
        assert ("patch_embed", "matmul") in status().calls


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("mode", ON_IMAGES)
@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_empty_batches_keep_the_graph(mode, kind):
    embeds = small_vit(pos_embed=kind).embeds
    embeds.proj.requires_grad_(False)
    enable(mode)
    first(embeds(torch.zeros(0, 1, 24, 28))).sum().backward()
    for table in tables(embeds):
        assert not table.grad.any()
    assert status().calls == {("pos_embed", ON_IMAGES[mode]): 1}
