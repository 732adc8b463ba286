"""Whole NaFlexVits: outputs, gradients and training under each strategy against unpatched timm."""

import pytest
import timm
import torch

from tests.support.oracles import NEW_TIMM, OLD_TORCH, relative, small_vit, vit_batch
from tests.support.running import running
from timm_naflex_fast import enable, status

SIZES = [(12, 21), (16, 16), (9, 28), (21, 12), (9, 28)]
RADIO = dict(pos_embed_antialias=False, pos_embed_align_corners=True) if NEW_TIMM else {}
MODELS = {
    "siglip": ("naflexvit_base_patch16_siglip", dict(depth=1)),
    "radio": (
        "naflexvit_base_patch16_gap",
        dict(
            depth=1,
            pos_embed_grid_size=(128, 128),
            pos_embed_interp_mode="bilinear",
            pos_embed_ar_preserving=True,
            class_token=True,
            reg_tokens=4,
            embed_dim=192,
            num_heads=3,
            **RADIO,
        ),
    ),
    "factorized": ("naflexvit_base_patch16_parfac_gap", dict(depth=1, embed_dim=192, num_heads=3)),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    torch.manual_seed(0)
    name, settings = MODELS[request.param]
    return timm.create_model(name, **settings).eval()


def step(model, batch, mode):
    """Pooled features and all gradients of one forward and backward."""
    # timm's grid_sample flag is for NaFlex batches, so plain images are left to timm.
    with (enable if mode == "grid_sample" and len(batch) == 1 else running)(mode):
        model.zero_grad()
        features = model.forward_features(*batch)
        features = features["patches"] if isinstance(features, dict) else features
        out = model.forward_head(features, patch_valid=batch[-1] if len(batch) > 1 else None, pre_logits=True)
        # Not a square: that of a normalised output is a constant, and its gradient nothing but rounding.
        (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(0))).mean().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def naflex(model):
    batch = vit_batch(SIZES, 16, 3)
    return batch["patches"], batch["patch_coord"], batch["patch_valid"]


@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
def test_outputs_and_gradients_equal_stock(model, mode):
    for batch in (naflex(model), (torch.randn(2, 3, 208, 272),)):
        want, want_grads = step(model, batch, "stock")
        got, got_grads = step(model, batch, mode)
        assert relative(got, want) <= 1e-5
        assert got_grads.keys() == want_grads.keys()
        worst = {name: relative(got_grads[name], grad) for name, grad in want_grads.items() if grad.abs().max() > 1e-7}
        assert max(worst.values()) <= 1e-5, worst
        assert any("pos_embed" in name for name in worst)


def test_grid_sample_differs_and_by_how_much_at_least(model):
    small = vit_batch([(5, 9), (7, 6), (10, 3)], 16, 3)
    batch = small["patches"], small["patch_coord"], small["patch_valid"]
    (want, _), (got, _) = step(model, batch, "stock"), step(model, batch, "grid_sample")
    drift = relative(got, want)
    if model.embeds.pos_embed_type == "factorized" or (NEW_TIMM and not model.embeds.pos_embed_antialias):
        assert drift <= 1e-4  # nothing is antialiased there, so sampling is exact too
    else:
        assert drift >= 1e-3


@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_plain_images_equal_stock(kind):
    for proj in ("linear", "conv"):
        model = small_vit(pos_embed=kind, embed_proj_type=proj)
        images = torch.randn(3, 1, 20, 36)
        want, want_grads = step(model, (images,), "stock")
        for mode in ("matmul", "interpolate_cached", "grid_sample"):
            got, got_grads = step(model, (images,), mode)
            assert relative(got, want) <= 1e-5
            worst = max(relative(got_grads[name], grad) for name, grad in want_grads.items() if grad.abs().max() > 1e-7)
            assert worst <= 1e-5
            with torch.no_grad():
                plain = model.embeds(images)
                for _ in range(2):  # the second time from the cache where there is one
                    with enable(mode):
                        frozen = model.embeds(images)
                    for a, b in zip(frozen, plain):
                        assert not torch.is_tensor(a) or relative(a, b) <= 1e-6


@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
def test_autocast_equals_stock(mode):
    model, batch = small_vit(), vit_batch([(5, 7), (12, 4), (3, 3)])
    batch = batch["patches"], batch["patch_coord"], batch["patch_valid"]
    with torch.autocast("cpu", torch.bfloat16):
        want, want_grads = step(model, batch, "stock")
        got, got_grads = step(model, batch, mode)
    assert relative(got, want) <= (0 if mode == "interpolate_cached" else 1e-2)
    table = "embeds.pos_embed"
    assert relative(got_grads[table], want_grads[table]) <= 2e-2  # stock sums repeats in bfloat16


@pytest.mark.skipif(not NEW_TIMM, reason="older timm reads the largest grid back for its grid_sample")
@pytest.mark.skipif(OLD_TORCH, reason="this torch's compiler cannot ask whether a module has a name")
def test_learned_grid_sample_compiles_in_one_graph():
    model, batch = small_vit(), vit_batch([(5, 7), (12, 4), (3, 3)])
    with running("grid_sample"), torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert relative(compiled(batch), model(batch)) <= 1e-5


@pytest.mark.parametrize("transform", ["functional_call", "checkpoint", "func.grad"])
def test_ways_to_call_a_model(transform):
    model, batch = small_vit(), vit_batch([(5, 7), (12, 4), (3, 3)])
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, (batch,)).square().mean()

    model.zero_grad()
    model(batch).square().mean().backward()
    stock_grad = model.embeds.pos_embed.grad.clone()
    with enable():
        if transform == "functional_call":
            grad = torch.autograd.grad(loss(parameters), parameters["embeds.pos_embed"])[0]
        elif transform == "func.grad":
            grad = torch.func.grad(loss)(parameters)["embeds.pos_embed"]
        else:
            model.zero_grad()
            torch.utils.checkpoint.checkpoint(model, batch, use_reentrant=False).square().mean().backward()
            grad = model.embeds.pos_embed.grad
        who = "stock" if transform == "func.grad" else "matmul"  # function transforms are left to timm
        assert {key for key in status().calls if key[0] == "pos_embed"} == {("pos_embed", who)}
    assert relative(grad, stock_grad) <= 1e-5
