"""A model's own choice: what it goes along with, and where it ends."""

import copy
import pickle

import pytest
import timm
import torch
from oracles import is_pristine, small_vit, uses

from timm_naflex_fast import disable, enable, status
from timm_naflex_fast.patching import settings


def own(model):
    return settings.own_flags(model.embeds)


@pytest.mark.usefixtures("clean")
def test_copies_keep_the_choice_and_the_checkpoint_stays_as_it_was():
    model = small_vit()
    keys, names = list(model.state_dict()), [name for name, _ in model.named_modules()]
    enable("grid_sample", model=model)
    assert list(model.state_dict()) == keys and [name for name, _ in model.named_modules()] == names
    average = timm.utils.ModelEmaV3(model).module
    copies = [copy.deepcopy(model), average, pickle.loads(pickle.dumps(model))]
    assert [uses(m) for m in copies] == ["grid_sample"] * 3
    disable(model)  # its copies have a choice of their own
    assert uses(model) == "stock" and [uses(m) for m in copies] == ["grid_sample"] * 3
    disable()
    assert is_pristine() and [uses(m) for m in copies] == ["stock"] * 3
    enable()
    assert [own(m) for m in copies] == [None] * 3  # ended for good


def test_a_pickled_model_needs_nothing_of_ours():
    model = small_vit()
    enable("matmul", model=model)
    assert b"timm_naflex_fast" not in pickle.dumps(model)
    disable()
    assert settings.ATTRIBUTE not in model.embeds.__dict__


def test_a_collected_model_leaves_nothing():
    model = small_vit()
    enable("grid_sample", model=model)
    del model
    with enable("matmul"):
        pass
    assert is_pristine() and status().models == ()


@pytest.mark.usefixtures("clean")
def test_a_pickled_choice_ends_with_disable_and_with_the_process(monkeypatch):
    model = small_vit()
    enable("grid_sample", model=model)
    data = pickle.dumps(model)
    assert settings.own_flags(pickle.loads(data).embeds).pos_embed == "grid_sample"
    unused = pickle.loads(data)
    monkeypatch.setattr(settings, "_token", "another process")
    assert settings.own_flags(pickle.loads(data).embeds) is None
    monkeypatch.undo()
    disable()
    enable("matmul")
    assert settings.own_flags(unused.embeds) is None


def test_a_choice_that_ended_is_not_copied():
    choice = settings.ModelChoice(settings.Flags("matmul"))
    assert copy.deepcopy(choice).flags == choice.flags and copy.deepcopy(choice) is not choice
    choice.flags = None
    assert copy.deepcopy(choice) is None


def test_the_mode_of_a_command_that_was_given_none(monkeypatch):
    monkeypatch.delenv("TIMM_NAFLEX_FAST_MODE", raising=False)
    assert settings.default_mode() == "matmul"
    for text, mode in (("", "matmul"), ("grid-sample", "grid_sample"), ("interpolate_cached", "interpolate_cached")):
        monkeypatch.setenv("TIMM_NAFLEX_FAST_MODE", text)
        assert settings.default_mode() == mode
    monkeypatch.setenv("TIMM_NAFLEX_FAST_MODE", "fast")
    with pytest.raises(ValueError, match="'fast' is not valid for TIMM_NAFLEX_FAST_MODE; valid: 'stock', "):
        settings.default_mode()


@pytest.mark.parametrize("compiling", [False, True])
def test_whose_choice_holds(compiling, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    everywhere, own = settings.Flags("interpolate_cached"), settings.Flags("matmul", "stock", "batched")
    ended = settings.ModelChoice(own)
    ended.flags = None
    pickled = pickle.loads(pickle.dumps(settings.ModelChoice(own)))
    stranger = dict(pickled, token="that of another process")
    for choice, flags in [
        (None, everywhere),
        (settings.ModelChoice(own), own),
        (ended, everywhere),
        (pickled, own),
        (stranger, everywhere),
        ({name: value for name, value in pickled.items() if name != "token"}, everywhere),
    ]:
        module = torch.nn.Module()
        if choice is not None:
            module.__dict__[settings.ATTRIBUTE] = choice
        for step in settings.FLAGS:
            assert settings.chosen(module, step, everywhere) == getattr(flags, step)
            assert settings.chosen(None, step, everywhere) == getattr(everywhere, step)
        if compiling:  # nothing is written then
            assert module.__dict__.get(settings.ATTRIBUTE) is choice
