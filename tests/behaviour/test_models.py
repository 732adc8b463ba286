"""Whole NaFlexVits: outputs, gradients and training under each strategy against unpatched timm."""

import pytest
import timm
import torch

from tests.support.oracles import BATCH, NEW_TIMM, far, relative, small_vit, trained, vit_batch
from tests.support.running import running

SIZES = [(12, 21), (16, 16), (9, 28), (21, 12), (9, 28)]
SMALL = dict(depth=1, embed_dim=192, num_heads=3)
RADIO = dict(pos_embed_grid_size=(128, 128), pos_embed_interp_mode="bilinear", pos_embed_ar_preserving=True)
RADIO |= dict(class_token=True, reg_tokens=4)
RADIO |= dict(pos_embed_antialias=False, pos_embed_align_corners=True) if NEW_TIMM else {}
MODELS = {"siglip": {}, "gap": RADIO, "parfac_gap": {}}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    return timm.create_model(f"naflexvit_base_patch16_{request.param}", **SMALL, **MODELS[request.param]).eval()


def step(model, batch, mode):
    """Pooled features and all gradients of one forward and backward."""

    def pooled(batch):
        features = model.forward_features(*batch)
        features = features["patches"] if isinstance(features, dict) else features
        return model.forward_head(features, patch_valid=batch[-1] if len(batch) > 1 else None, pre_logits=True)

    with running(mode):
        return trained(model, batch, pooled)


@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
def test_outputs_and_gradients_equal_stock(model, mode):
    images = torch.randn(2, 3, 208, 272)
    for batch in (tuple(vit_batch(SIZES, 16, 3).values()), (images,)):
        want = step(model, batch, "stock")
        assert far(step(model, batch, mode), want) <= 1e-5
        assert any("pos_embed" in name and grad.abs().max() > 1e-7 for name, grad in want[1].items())
    with torch.no_grad():
        want = model.embeds(images)[0]
        with running(mode):
            for _ in range(3):  # at last from the cache
                assert relative(model.embeds(images)[0], want) <= 1e-6


@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
def test_autocast_equals_stock(mode):
    model, batch = small_vit(), tuple(BATCH.values())
    with torch.autocast("cpu", torch.bfloat16):
        (want, want_grads), (got, got_grads) = step(model, batch, "stock"), step(model, batch, mode)
    assert relative(got, want) <= (0 if mode == "interpolate_cached" else 1e-2)
    table = "embeds.pos_embed"
    assert relative(got_grads[table], want_grads[table]) <= 2e-2  # stock sums repeats in bfloat16
