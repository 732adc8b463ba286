"""A model's own settings: where they end. Which of them hold, behaviour/test_handles.py compares with a rule."""

import pickle

import pytest

from tests.support.oracles import small_vit
from timm_naflex_fast import enable
from timm_naflex_fast.patching import settings


@pytest.mark.usefixtures("clean")
def test_checkpoints_and_pickles_hold_nothing_of_ours():
    model = small_vit()
    keys, names = list(model.state_dict()), [name for name, _ in model.named_modules()]
    enable("grid_sample", model=model)
    assert list(model.state_dict()) == keys and [name for name, _ in model.named_modules()] == names
    data = pickle.dumps(model)
    assert b"timm_naflex_fast" not in data
    assert getattr(pickle.loads(data).embeds, settings.ATTRIBUTE) is None
