"""Attributes that an object has for a while."""

import pytest

from timm_naflex_fast.measure.contenders import temporarily


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
