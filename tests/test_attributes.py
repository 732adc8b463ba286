"""Attributes that an object has for a while."""

import pytest

from timm_naflex_fast.attributes import temporarily


class Base:
    inherited = 1


def test_an_attribute_comes_back_after_an_error_too():
    thing = Base()
    thing.own = 2
    with pytest.raises(KeyError), temporarily(thing, {"own": 3, "inherited": 4}):
        assert (thing.own, thing.inherited) == (3, 4)
        raise KeyError
    assert vars(thing) == {"own": 2}


def test_a_class_inherits_again_what_it_had_for_a_while():
    child = type("Child", (Base,), {})
    with temporarily(child, {"inherited": 5}):
        assert (child.inherited, Base.inherited) == (5, 1)
    assert "inherited" not in vars(child)


def test_a_module_of_a_module_comes_back_and_nothing_stays_on_it():
    from torch import nn

    whole = nn.Module()
    whole.part = part = nn.Linear(2, 3)
    with temporarily(whole, {"part": nn.Identity(), "forward": lambda x: x}):
        assert isinstance(whole.part, nn.Identity)
        assert whole(5) == 5
    assert whole.part is part
    assert "forward" not in vars(whole)
