"""enable / disable: what is replaced, for whom, and that it always comes back."""

import functools
import importlib
import itertools
import pickle
import re
import sys
import threading
from unittest import mock

import pytest
import torch
from timm.models.naflexvit import NaFlexEmbeds
from torch import nn

from tests.support.checks import slow
from tests.support.oracles import (
    OLD_TORCH,
    embed,
    is_pristine,
    small_vit,
    uses,
)
from tests.support.oracles import STOCK as STOCK_METHODS
from tests.support.running import running
from timm_naflex_fast import disable, enable, status

pytestmark = pytest.mark.usefixtures("clean")
LEARNED = "_apply_learned_naflex_pos_embed"


@pytest.mark.parametrize(
    ("mode", "who"), [("interpolate-cached", "interpolate_cached"), ("matmul-resample", "matmul")]
)
def test_enable_replaces_and_disable_restores_exactly(mode, who):
    enable(mode=mode)
    assert uses(small_vit()) == who
    enable(mode, pos_embed="grid_sample", patch_embed="stock", rope="stock")
    flags = "Settings(pos_embed='grid_sample', patch_embed='stock', rope='stock')"
    assert str(status().flags) == flags
    disable()
    assert is_pristine()
    assert status().flags.pos_embed == "stock"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(mode="fast"),
            "'fast' is not valid for mode; valid: 'stock', 'matmul', 'interpolate_cached', 'grid_sample'",
        ),
        (dict(mode=nn.Linear(1, 1)), "is not valid for mode; valid: 'stock', 'matmul'"),
        (
            dict(patch_embed="grid_sample"),
            "'grid_sample' is not valid for patch_embed; valid: 'stock', 'matmul'",
        ),
        (dict(rope=3), "'3' is not valid for rope; valid: 'stock', 'batched'"),
        (dict(library="jax"), "'jax' is not valid for library; valid: 'timm', 'transformers'"),
        (dict(library=None), "'None' is not valid for library; valid: 'timm', 'transformers'"),
        (dict(model=nn.Linear(2, 2)), "Linear contains no timm NaFlexEmbeds"),
        (dict(model="naflexvit"), "valid is any torch.nn.Module that contains one of them"),
    ],
)
def test_bad_arguments_name_what_is_valid_and_change_nothing(arguments, message):
    enable("grid_sample")
    with pytest.raises(ValueError, match=re.escape(message)):
        enable(**arguments)
    assert uses(small_vit()) == "grid_sample"


@functools.wraps(STOCK_METHODS[LEARNED])
def spied(self, x, patch_coord):
    """Looks like what it wraps, and changes the result."""
    STOCK_METHODS[LEARNED](self, x, patch_coord)
    x.mul_(2)


@pytest.mark.parametrize(
    ("other", "by"),
    [
        (spied, f"{__name__}.NaFlexEmbeds.{LEARNED}"),
        (mock.MagicMock(return_value=None), "unittest.mock.MagicMock"),
    ],
)
@pytest.mark.parametrize("for_one", [False, True])
def test_what_another_has_put_on_the_class_before_is_refused_by_name(
    other, by, for_one, monkeypatch
):
    model = small_vit()
    with monkeypatch.context() as patched:
        patched.setattr(NaFlexEmbeds, LEARNED, other)
        want = embed(model)
        named = rf"NaFlexEmbeds.{LEARNED} is {by}.*call enable\(\) before.*Nothing was changed"
        with pytest.raises(RuntimeError, match=named):
            enable("grid_sample", model=model if for_one else None)
        assert torch.equal(embed(model), want)
        assert status().replaced == {}
        assert vars(NaFlexEmbeds)[LEARNED] is other
    enable(model=model)
    assert uses(model) == "matmul"
    assert f"NaFlexEmbeds.{LEARNED}" in status().replaced


def of_its_class(model, method):
    model.embeds.__class__ = type("Hides", (NaFlexEmbeds,), {LEARNED: method})


def of_its_own(model, method):
    setattr(model.embeds, LEARNED, method.__get__(model.embeds))


@pytest.mark.parametrize("put", [of_its_class, of_its_own])
def test_what_hides_ours_in_a_model_is_named_by_its_status(put):
    model = small_vit()
    enable(model=nn.ModuleList([model, small_vit()]))
    put(model, spied)
    embed(model)
    assert status().calls == {}
    by = f"{__name__}.NaFlexEmbeds.{LEARNED}"
    assert status(model).replaced[f"NaFlexEmbeds.{LEARNED}"] == by
    # What calls ours does not hide it.
    put(model, lambda self, x, patch_coord: getattr(NaFlexEmbeds, LEARNED)(self, x, patch_coord))
    assert uses(model) == "matmul"


@pytest.mark.skipif(OLD_TORCH, reason="transformers needs a newer torch")
@pytest.mark.parametrize("order", [("timm", "transformers"), ("transformers", "timm")])
def test_of_several_libraries_all_are_checked_before_the_first_is_changed(order, monkeypatch):
    # The first import of a tower puts another module in the place of transformers itself.
    pytest.importorskip("transformers.models.siglip2.modeling_siglip2")
    monkeypatch.setattr("transformers.__version__", "5.20.9")
    with pytest.raises(RuntimeError, match=r"transformers 5.20.9 .*too old.*Nothing was changed"):
        enable(library=order)
    assert is_pristine()
    assert status().replaced == {}


def test_a_replaced_method_pickles_by_timms_own_name():
    model = small_vit()
    with enable():
        data = pickle.dumps((vars(NaFlexEmbeds)[LEARNED], model.embeds._apply_learned_pos_embed))
    assert b"timm_naflex_fast" not in data
    method, bound = pickle.loads(data)
    assert method is STOCK_METHODS[LEARNED]
    assert bound.__func__ is STOCK_METHODS["_apply_learned_pos_embed"]


def test_strict_raises_where_timms_own_code_would_run():
    model = small_vit(pos_embed_interp_mode="nearest")
    other = small_vit(pos_embed_interp_mode="nearest")
    reason = "a position table with interpolation mode 'nearest'"
    forbidden = rf"{reason} needs timm's own code, and enable\(strict=True\) forbids it"
    by_timm = pytest.raises(ValueError, match="align_corners option")
    with enable(strict=True) as handle:
        assert handle.flags.strict
        with pytest.raises(RuntimeError, match=forbidden):
            embed(model)
        assert status().fallbacks == {}
        # One model's own choice is not strict.
        with enable(model=other), by_timm, pytest.warns(match=f"{reason} stays with timm's own"):
            embed(other)


@pytest.mark.parametrize("count", [2, slow(3)])
def test_a_temporary_patch_anywhere_between_leaves_no_trace(count):
    """A mock, as tests put it on: it keeps what it found, and puts that back."""
    model = small_vit()
    found = []

    def put_on():
        under = vars(NaFlexEmbeds)[LEARNED]
        found.append(under)
        wrapper = functools.wraps(under)(lambda self, x, patch_coord: under(self, x, patch_coord))
        setattr(NaFlexEmbeds, LEARNED, wrapper)

    def leave():
        if found:
            setattr(NaFlexEmbeds, LEARNED, found.pop())

    def choose():
        try:
            enable("grid_sample")
        except RuntimeError as refused:
            assert found and "call enable() before" in str(refused)
        else:  # what another has put over ours calls ours
            assert uses(model) == "grid_sample"
            assert status().replaced[f"NaFlexEmbeds.{LEARNED}"] == "grid_sample"

    possible = (choose, disable, put_on, leave)
    for steps in itertools.product(possible, repeat=count):
        for step in steps:
            step()
        embed(model)  # runs, whatever holds
        while found:
            leave()
        enable("grid_sample")
        assert uses(model) == "grid_sample", steps
        disable()
        assert is_pristine(), steps


def test_a_library_that_cannot_be_imported_is_missed_only_where_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RuntimeError, match="transformers cannot be imported"):
        enable(library="transformers")
    model = small_vit()
    with running(model=model):
        embed(model)


def test_a_thread_that_imports_a_library_never_waits_for_the_lock(monkeypatch):
    """It holds the import's lock, for which whoever enables may be waiting."""
    model = small_vit()
    imported = []
    real = importlib.import_module

    def watched(name):
        if name.startswith("timm") and threading.current_thread() is threading.main_thread():
            imported.append(name)
            other = threading.Thread(target=disable, daemon=True)
            other.start()
            other.join(5)
            assert not other.is_alive()
        return real(name)

    monkeypatch.setattr(importlib, "import_module", watched)
    for verb in (enable, lambda: enable(model=model), lambda: disable(model), status):
        imported.clear()
        verb()
        assert imported[0] == "timm"
    disable()
