"""A model's own settings: what they go along with, and where they end."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

from tests.support.oracles import is_pristine, small_vit, uses
from timm_naflex_fast import disable, enable, status
from timm_naflex_fast.patching import settings


def own(model):
    return settings.own_settings(model.embeds)


@pytest.mark.usefixtures("clean")
def test_checkpoints_and_pickles_hold_nothing_of_ours():
    model = small_vit()
    keys, names = list(model.state_dict()), [name for name, _ in model.named_modules()]
    enable("grid_sample", model=model)
    assert list(model.state_dict()) == keys and [name for name, _ in model.named_modules()] == names
    data = pickle.dumps(model)
    assert b"timm_naflex_fast" not in data
    loaded = pickle.loads(data)
    assert own(loaded) is None and uses(loaded) == "stock" and uses(model) == "grid_sample"
    enable("matmul")
    assert uses(loaded) == "matmul"
    enable("interpolate_cached", model=loaded)
    assert uses(loaded) == "interpolate_cached" and uses(copy.deepcopy(loaded)) == "interpolate_cached"
    disable()
    assert settings.ATTRIBUTE not in model.embeds.__dict__


def test_a_collected_model_leaves_nothing():
    model = small_vit()
    enable("grid_sample", model=model)
    del model
    gc.collect()
    assert status().models == () and is_pristine()


def test_the_mode_of_a_command_that_was_given_none(monkeypatch):
    monkeypatch.delenv("TIMM_NAFLEX_FAST_MODE", raising=False)
    assert settings.default_mode() == "matmul"
    for text, mode in (("", "matmul"), ("grid-sample", "grid_sample"), ("interpolate_cached", "interpolate_cached")):
        monkeypatch.setenv("TIMM_NAFLEX_FAST_MODE", text)
        assert settings.default_mode() == mode
    monkeypatch.setenv("TIMM_NAFLEX_FAST_MODE", "fast")
    with pytest.raises(ValueError, match="'fast' is not valid for TIMM_NAFLEX_FAST_MODE; valid: 'stock', "):
        settings.default_mode()


def test_whose_settings_hold():
    everywhere, own = settings.Settings("interpolate_cached"), settings.Settings("matmul", "stock", "batched")
    ended, none = settings.Enabled(None), pickle.loads(pickle.dumps(settings.Enabled(own)))
    exempt = settings.Enabled(settings.STOCK)
    for newest_first, want in [
        ((), everywhere),
        ((settings.Enabled(own),), own),
        ((settings.Enabled(own), exempt), own),
        ((exempt, settings.Enabled(own)), settings.STOCK),
        ((ended, settings.Enabled(own)), own),
        ((none, settings.Enabled(own)), own),
        ((ended, none), everywhere),
    ]:
        module = torch.nn.Module()
        if newest_first:
            module.__dict__[settings.ATTRIBUTE] = newest_first
        for component in settings.VALID_MODES:
            assert settings.mode_of(module, component, everywhere) == getattr(want, component)
            assert settings.mode_of(None, component, everywhere) == getattr(everywhere, component)


def test_what_may_hold_again():
    class Handle:
        pass

    handle = Handle()
    first, second, third = (settings.Enabled(settings.STOCK) for _ in range(3))
    assert settings.may_hold((third, second, first)) == (third,)  # nothing can end it alone
    third.handle = weakref.ref(handle)
    assert settings.may_hold((third, None, second, first)) == (third, second)
    second.settings = None
    assert settings.may_hold((third, second, first)) == (third, first)
    del handle
    assert settings.may_hold((third, second, first)) == (third,)
    assert settings.may_hold(()) == ()
