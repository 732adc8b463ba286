"""importlib.reload of timm's modules: status tells the truth, enable patches what is new, disable restores all."""

import importlib
import sys

import pytest
import torch
from oracles import BATCH, PRISTINE, embed, small_vit

from timm_naflex_fast import disable, enable, status
from timm_naflex_fast.patching import timm as patching_timm

LEARNED = "NaFlexEmbeds._apply_learned_naflex_pos_embed"


@pytest.fixture
def put_back():
    """The modules' contents of before the test: other tests hold classes of them."""
    names = ("timm.models.naflexvit", "timm.layers.patch_embed")
    before = {name: dict(vars(importlib.import_module(name))) for name in names}
    from timm.models import _registry

    registry = {key: dict(value) if isinstance(value, dict) else value for key, value in vars(_registry).items()}
    yield
    disable()
    for name, contents in before.items():
        vars(sys.modules[name]).clear()
        vars(sys.modules[name]).update(contents)
    for key, value in registry.items():
        if isinstance(value, dict):
            getattr(_registry, key).update(value)


def reload(name):
    return importlib.reload(sys.modules[name])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_reloaded_model_file(put_back):
    old = small_vit()
    want = embed(old)
    enable("grid_sample")
    naflexvit = reload("timm.models.naflexvit")
    new_class = naflexvit.NaFlexEmbeds
    timms = dict(vars(new_class))
    assert new_class is not type(old.embeds) and LEARNED not in status().replaced  # its class is timm's own
    assert not torch.allclose(embed(old), want, atol=1e-4)  # models of before are still patched
    enable("grid_sample")
    assert status().replaced[LEARNED] == "grid_sample"
    new = naflexvit.NaFlexVit(old_config(naflexvit), in_chans=1, num_classes=5)
    new.load_state_dict(old.state_dict())
    assert torch.equal(embed(new), embed(old)) and not torch.allclose(embed(new), want, atol=1e-4)
    assert status().calls == {("pos_embed", "grid_sample"): 3}
    disable()
    assert status().replaced == {} and torch.equal(embed(new), want) and torch.equal(embed(old), want)
    assert all(new_class.__dict__[name] is function for name, function in timms.items() if callable(function))
    assert all(PRISTINE[type(old.embeds)][n] is f for n, f in vars(type(old.embeds)).items() if n.startswith("_apply"))
    with enable("grid_sample", model=old), enable("grid_sample", model=new):
        assert not torch.allclose(embed(new), want, atol=1e-4) and torch.equal(embed(new), embed(old))


def old_config(naflexvit):
    return naflexvit.NaFlexVitCfg(
        patch_size=4,
        embed_dim=32,
        depth=2,
        num_heads=2,
        mlp_ratio=2.0,
        global_pool="avg",
        pos_embed_grid_size=(8, 8),
        class_token=False,
        reg_tokens=0,
    )


@pytest.mark.parametrize("enabled_before", [True, False])
def test_a_reloaded_layer_file(put_back, enabled_before):
    model = small_vit(enable_patch_interpolator=True)
    weight = torch.randn(5, 3, 8, 8)
    if enabled_before:
        enable()
    home = reload("timm.layers.patch_embed")
    timms, interpolator = home.resample_patch_embed, dict(vars(home.PatchEmbedInterpolator))
    key = "timm.layers.patch_embed.resample_patch_embed"
    assert key not in status().replaced and "PatchEmbedInterpolator.forward" not in status().replaced
    enable()
    assert status().replaced[key] == "matmul" and status().replaced["PatchEmbedInterpolator.forward"] == "matmul"
    ours = patching_timm.resample_patch_embed
    assert home.resample_patch_embed is ours and sys.modules["timm.layers"].resample_patch_embed is ours
    home.resample_patch_embed(weight, [6, 10])
    patches = torch.randn(5, 64, 6, 5, 1)
    model.embeds(patches, patch_coord=BATCH["patch_coord"])  # its interpolator is of the class of before
    assert status().calls["patch_embed", "matmul"] == 2 and ("patch_embed", "stock") not in status().calls
    disable()
    assert home.resample_patch_embed is timms and status().replaced == {}
    assert all(vars(home.PatchEmbedInterpolator)[n] is f for n, f in interpolator.items() if callable(f))
    assert sys.modules["timm.layers"].resample_patch_embed is not ours
