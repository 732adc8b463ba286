"""enable / disable: what is replaced, for whom, and that it always comes back."""

import builtins
import functools
import importlib
import itertools
import pickle
import re
import sys
from unittest import mock

import pytest
import torch
from timm.layers import patch_embed
from timm.models.naflexvit import NaFlexEmbeds
from torch import nn

from tests.support.checks import slow
from tests.support.oracles import (
    OLD_TORCH,
    PRISTINE,
    defined_in,
    embed,
    is_pristine,
    small_vit,
    uses,
)
from tests.support.oracles import STOCK as STOCK_METHODS
from tests.support.running import running
from timm_naflex_fast import disable, enable, status
from timm_naflex_fast.patching import choices, transformers_methods
from timm_naflex_fast.patching.calls import STOCK, Settings

pytestmark = pytest.mark.usefixtures("clean")
LEARNED = "_apply_learned_naflex_pos_embed"


@pytest.mark.parametrize(
    ("mode", "who"), [("interpolate-cached", "interpolate_cached"), ("matmul-resample", "matmul")]
)
def test_enable_replaces_and_disable_restores_exactly(mode, who):
    enable(mode=mode)
    assert uses(small_vit()) == who
    enable(mode, pos_embed="grid_sample", patch_embed="stock", rope="stock")
    assert status().flags == Settings("grid_sample", "stock", "stock")
    disable()
    assert is_pristine()
    assert status().flags == STOCK


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


def test_a_wrapper_that_was_left_over_ours_is_seen_through(monkeypatch):
    model = small_vit()
    enable()
    ours = vars(NaFlexEmbeds)[LEARNED]
    wrapper = functools.wraps(ours)(lambda *given, **named: ours(*given, **named))
    with monkeypatch.context() as patched:
        patched.setattr(NaFlexEmbeds, LEARNED, wrapper)
        disable()
        enable("grid_sample")
        assert uses(model) == "grid_sample"
        assert status().replaced[f"NaFlexEmbeds.{LEARNED}"] == "grid_sample"
        disable()


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
    siglip2 = pytest.importorskip("transformers.models.siglip2.modeling_siglip2")
    resize = lambda positional_embeddings, spatial_shapes, max_length, extra=None: None
    resize = staticmethod(defined_in(siglip2, resize))
    monkeypatch.setattr(siglip2.Siglip2VisionEmbeddings, "resize_positional_embeddings", resize)
    with pytest.raises(RuntimeError, match=r"extra=None.*Nothing was changed"):
        enable(library=order)
    assert is_pristine()
    assert status().replaced == {}


def test_a_replaced_function_pickles_by_the_librarys_own_name():
    interpolator = patch_embed.PatchEmbedInterpolator((4, 4), 3, 5)
    with enable():
        ours = patch_embed.resample_patch_embed, vars(NaFlexEmbeds)[LEARNED]
        data = pickle.dumps((*ours, interpolator.forward))
    assert b"timm_naflex_fast" not in data
    function, method, bound = pickle.loads(data)
    assert (function, method) == (patch_embed.resample_patch_embed, vars(NaFlexEmbeds)[LEARNED])
    assert bound.__func__ is PRISTINE[patch_embed.PatchEmbedInterpolator]["forward"]


def test_strict_raises_where_the_librarys_own_code_would_run():
    model = small_vit()
    other = small_vit()

    def transformed(model):
        def added(x):
            model.embeds._apply_learned_naflex_pos_embed(x.mul(1), torch.zeros(2, 6, 2))
            return x.sum()

        torch.func.grad(added)(torch.zeros(2, 6, 32))

    with enable(strict=True) as handle:
        assert handle.flags.strict
        with pytest.raises(
            RuntimeError, match=r"a torch.func transform needs timm's own code.*strict=True"
        ):
            transformed(model)
        assert status().fallbacks == {}
        # One model's own choice is not strict.
        with enable(model=other), pytest.warns(UserWarning, match="stays with timm's own code"):
            transformed(other)
            assert status().fallbacks == {"a torch.func transform": 1}


@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
@pytest.mark.parametrize("count", [2, slow(3)])
def test_a_temporary_patch_anywhere_between_leaves_no_trace(count):
    """A mock, as tests put it on: it keeps what it found, and puts that back."""
    model = small_vit()
    found = []

    def put_on():
        under = vars(NaFlexEmbeds)[LEARNED]
        found.append(under)
        setattr(NaFlexEmbeds, LEARNED, lambda self, x, patch_coord: under(self, x, patch_coord))

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
    for home, _ in transformers_methods.LIBRARY.replacements:
        monkeypatch.setitem(sys.modules, home.partition(":")[0], None)
    with pytest.raises(RuntimeError, match="transformers cannot be imported"):
        enable(library="transformers")
    model = small_vit()
    with running(model=model):
        embed(model)


@pytest.mark.skipif(OLD_TORCH, reason="transformers needs a newer torch")
def test_nothing_is_imported_while_the_lock_is_held_and_the_library_comes_first(monkeypatch):
    """Another thread may hold a library's import lock and wait for ours."""
    pytest.importorskip("transformers", minversion="5.21")
    imported = []
    model = small_vit()

    def watch(real, name, *rest, **options):
        if name.startswith(("timm", "transformers")):
            assert not choices.lock._is_owned(), name
            imported.append(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(
        importlib, "import_module", functools.partial(watch, importlib.import_module)
    )
    monkeypatch.setattr(builtins, "__import__", functools.partial(watch, builtins.__import__))
    enable("grid_sample")
    assert imported.index("timm") < imported.index("timm_naflex_fast.patching.timm_methods")
    enable("matmul", model=model)
    enable(library="transformers"), enable("stock").restore(), disable(model)
    status(), status(model), disable()
