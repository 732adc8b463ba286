"""A model's own settings: what they go along with, and where they end."""

import copy
import pickle

import pytest

from tests.support.oracles import small_vit, uses
from timm_naflex_fast import disable, enable
from timm_naflex_fast.patching import settings


@pytest.mark.usefixtures("clean")
def test_checkpoints_and_pickles_hold_nothing_of_ours():
    model = small_vit()
    keys, names = list(model.state_dict()), [name for name, _ in model.named_modules()]
    enable("grid_sample", model=model)
    assert list(model.state_dict()) == keys and [name for name, _ in model.named_modules()] == names
    data = pickle.dumps(model)
    assert b"timm_naflex_fast" not in data
    loaded = pickle.loads(data)
    assert getattr(loaded.embeds, settings.ATTRIBUTE) is None
    assert uses(loaded) == "stock" and uses(model) == "grid_sample"
    enable("matmul")
    assert uses(loaded) == "matmul"
    enable("interpolate_cached", model=loaded)
    assert uses(loaded) == "interpolate_cached" and uses(copy.deepcopy(loaded)) == "interpolate_cached"
    disable()
    assert settings.ATTRIBUTE not in model.embeds.__dict__


def test_the_mode_of_a_command_that_was_given_none(monkeypatch):
    monkeypatch.delenv("TIMM_NAFLEX_FAST_MODE", raising=False)
    assert settings.default_mode() == "matmul"
    for text, mode in (("", "matmul"), ("grid-sample", "grid_sample"), ("interpolate_cached", "interpolate_cached")):
        monkeypatch.setenv("TIMM_NAFLEX_FAST_MODE", text)
        assert settings.default_mode() == mode
    monkeypatch.setenv("TIMM_NAFLEX_FAST_MODE", "fast")
    with pytest.raises(ValueError, match="'fast' is not valid for TIMM_NAFLEX_FAST_MODE; valid: 'stock', "):
        settings.default_mode()
