"""Whole NaFlexVits and their embeddings under each strategy against unpatched timm, fake tensors,
empty batches."""

import pytest
import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.oracles import (
    NEW_TIMM,
    far,
    relative,
    row_major,
    small_vit,
    tables,
    trained,
    vit_batch,
)
from tests.support.running import running
from timm_naflex_fast import enable, status

SIZES, SMALL = (
    [(12, 21), (16, 16), (9, 28), (21, 12), (9, 28)],
    dict(depth=1, embed_dim=192, num_heads=3),
)
RADIO = dict(
    pos_embed_grid_size=(128, 128), pos_embed_interp_mode="bilinear", pos_embed_ar_preserving=True
)
RADIO |= dict(class_token=True, reg_tokens=4)
RADIO |= dict(pos_embed_antialias=False, pos_embed_align_corners=True) if NEW_TIMM else {}
COORD = row_major([(2, 3)])
# timm's grid_sample flag is for NaFlex batches, so plain images are left to timm.
ON_IMAGES = {"matmul": "matmul", "interpolate_cached": "interpolate_cached", "grid_sample": "stock"}
MODELS = {"siglip": {}, "gap": RADIO, "parfac_gap": {}}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    return timm.create_model(
        f"naflexvit_base_patch16_{request.param}", **SMALL, **MODELS[request.param]
    ).eval()


def step(model, batch, mode):
    """Pooled features and all gradients of one forward and backward."""

    def pooled(batch):
        features = model.forward_features(*batch)
        features = features["patches"] if isinstance(features, dict) else features
        return model.forward_head(
            features, patch_valid=batch[-1] if len(batch) > 1 else None, pre_logits=True
        )

    with running(mode):
        return trained(model, batch, pooled)


@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
def test_outputs_and_gradients_equal_stock(model, mode):
    images = torch.randn(2, 3, 208, 272)
    for batch in (tuple(vit_batch(SIZES, 16, 3).values()), (images,)):
        want = step(model, batch, "stock")
        assert far(step(model, batch, mode), want) <= 1e-5
        assert any(
            "pos_embed" in name and grad.abs().max() > 1e-7 for name, grad in want[1].items()
        )
    with torch.no_grad():
        want = model.embeds(images)[0]
        with running(mode):
            for _ in range(3):  # at last from the cache
                assert relative(model.embeds(images)[0], want) <= 1e-6


def first(out):
    return out[0] if isinstance(out, tuple) else out


@pytest.fixture
def embeds():
    return small_vit(enable_patch_interpolator=True).embeds.requires_grad_(False)


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("mode", ON_IMAGES)
@pytest.mark.parametrize("inside", ["fake", "make_fx"])
def test_fake_tensors_work_and_poison_nothing(embeds, mode, inside):
    image, patches = torch.randn(2, 1, 24, 28), torch.randn(1, 6, 3, 5, 1)
    want, want_patches = first(embeds(image)), first(embeds(patches, patch_coord=COORD))
    enable(mode)
    for _ in range(2):
        if inside == "fake":
            with FakeTensorMode(allow_non_fake_inputs=True) as fake:
                assert first(embeds(fake.from_tensor(image))).shape == want.shape
                weight = fake.from_tensor(embeds.proj.weight)
                assert embeds.patch_interpolator.resample_linear_weight(weight, (3, 5)).shape == (
                    32,
                    15,
                )
        else:
            trace = make_fx(
                lambda x: first(embeds(x)), tracing_mode="fake", _allow_non_fake_inputs=True
            )
            torch.testing.assert_close(trace(image)(image), want, atol=2e-6, rtol=0)
        torch.testing.assert_close(first(embeds(image)), want, atol=5e-6, rtol=0)
    if mode != "grid_sample":
        torch.testing.assert_close(
            first(embeds(patches, patch_coord=COORD)), want_patches, atol=5e-6, rtol=0
        )
    assert ("pos_embed", ON_IMAGES[mode]) in status().calls
    assert inside != "fake" or ("patch_embed", "matmul") in status().calls


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("mode", ON_IMAGES)
def test_empty_batches_keep_the_graph(mode):
    enable(mode)
    for kind in ("learned", "factorized"):
        embeds = small_vit(pos_embed=kind).embeds
        embeds.proj.requires_grad_(False)
        first(embeds(torch.zeros(0, 1, 24, 28))).sum().backward()
        assert all((table.grad == 0).all() for table in tables(embeds))
    assert status().calls == {("pos_embed", ON_IMAGES[mode]): 2}
