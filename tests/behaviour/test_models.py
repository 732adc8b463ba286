"""Whole NaFlexVits: outputs, gradients and training under each strategy against unpatched timm."""

import pytest
import timm
import torch

from tests.support.oracles import BATCH, NEW_TIMM, far, relative, small_vit, trained, vit_batch
from tests.support.running import running
from timm_naflex_fast import enable
from timm_naflex_fast.names import STRATEGY_NAMES

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

    # timm's grid_sample flag is for NaFlex batches, so plain images are left to timm.
    with (enable if mode == "grid_sample" and len(batch) == 1 else running)(mode):
        return trained(model, batch, pooled)


@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
def test_outputs_and_gradients_equal_stock(model, mode):
    for batch in (tuple(vit_batch(SIZES, 16, 3).values()), (torch.randn(2, 3, 208, 272),)):
        want = step(model, batch, "stock")
        assert far(step(model, batch, mode), want) <= 1e-5
        assert any("pos_embed" in name and grad.abs().max() > 1e-7 for name, grad in want[1].items())


@pytest.mark.parametrize("proj", ["linear", "conv"])
@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_plain_images_equal_stock(kind, proj):
    model, images = small_vit(pos_embed=kind, embed_proj_type=proj, depth=1), torch.randn(3, 1, 20, 36)
    want = step(model, (images,), "stock")
    plain = model.embeds(images)
    for mode in STRATEGY_NAMES:
        assert far(step(model, (images,), mode), want) <= 1e-5
        for _ in range(2):  # the second time from the cache where there is one
            with torch.no_grad(), enable(mode):
                frozen = model.embeds(images)
            for a, b in zip(frozen, plain):
                assert not torch.is_tensor(a) or relative(a, b) <= 1e-6


@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
def test_autocast_equals_stock(mode):
    model, batch = small_vit(), tuple(BATCH.values())
    with torch.autocast("cpu", torch.bfloat16):
        (want, want_grads), (got, got_grads) = step(model, batch, "stock"), step(model, batch, mode)
    assert relative(got, want) <= (0 if mode == "interpolate_cached" else 1e-2)
    table = "embeds.pos_embed"
    assert relative(got_grads[table], want_grads[table]) <= 2e-2  # stock sums repeats in bfloat16
