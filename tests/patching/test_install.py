"""enable / disable: what is replaced, for whom, and that it always comes back."""

import builtins
import functools
import gc
import importlib
import itertools
import pickle
import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import wrapt
from timm.layers import patch_embed
from timm.models import naflexvit
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
from timm_naflex_fast.patching import choices, decide, install, library, transformers
from timm_naflex_fast.patching import timm as patching_timm
from timm_naflex_fast.patching.choices import STOCK, VALID_MODES, Settings, parse_settings

pytestmark = pytest.mark.usefixtures("clean")
LEARNED = "_apply_learned_naflex_pos_embed"


@pytest.mark.parametrize(
    "mode", ["interpolate_cached", "grid_sample", "interpolate-cached", "matmul-resample"]
)
def test_enable_replaces_and_disable_restores_exactly(mode):
    enable(mode=mode)
    assert not is_pristine()
    assert uses(small_vit()) == mode.replace("-", "_").replace("_resample", "")
    enable(mode, pos_embed="grid_sample", patch_embed="stock", rope="stock")
    assert status().flags == Settings("grid_sample", "stock", "stock")
    disable()
    assert is_pristine()
    assert status().flags == STOCK


def test_threads_never_see_half_a_patch(monkeypatch):
    model = small_vit()
    seen = []
    wants = [embed(model)]
    with running("grid_sample"):
        wants.append(embed(model))
    found = set()
    count = itertools.count()

    def look():
        while next(count) < (
            300 if len(found) > 1 else 10_000
        ):  # on a busy machine one state may last long
            out = embed(model)
            found.add(tuple(torch.allclose(out, want, atol=1e-5) for want in wants))

    with ThreadPoolExecutor(2) as pool:
        threads = [pool.submit(look) for _ in range(2)]
        while not all(thread.done() for thread in threads):
            enable("grid_sample"), embed(model)
            disable(), embed(model)
    assert found == {(True, False), (False, True)}
    assert not any(thread.exception() for thread in threads)
    monkeypatch.setattr(
        install, "_begin", lambda *new, real=install._begin: (seen.append(uses(model)), real(*new))
    )
    enable("matmul", model=model), enable("grid_sample", model=model)
    assert seen == ["stock", "matmul"]  # not yet the new ones


def test_a_mode_takes_the_last_of_a_components_strategies():
    with mock.patch.dict(VALID_MODES, rope=("stock", "slower", "batched")):
        assert parse_settings("matmul", strict=False).rope == "batched"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(mode="fast"),
            "'fast' is not valid for mode; valid: 'stock', 'interpolate_cached', 'grid_sample'",
        ),
        (dict(mode=None), "None is not valid for mode"),
        (dict(mode=nn.Linear(1, 1)), "give a model by name: enable(model=...)"),
        (dict(pos_embed="nope"), "'nope' is not valid for pos_embed"),
        (
            dict(patch_embed="grid_sample"),
            "'grid_sample' is not valid for patch_embed; valid: 'stock', 'matmul'",
        ),
        (dict(rope="nope"), "'nope' is not valid for rope; valid: 'stock', 'batched'"),
        (
            dict(library="jax"),
            "'jax' is not valid for library; valid: 'timm', 'transformers'",
        ),
        (dict(model=nn.Linear(2, 2)), "Linear contains no timm NaFlexEmbeds"),
        (
            dict(model="naflexvit"),
            "valid is any torch.nn.Module that does, such as timm.create_model(",
        ),
    ],
)
def test_bad_arguments_name_what_is_valid_and_change_nothing(arguments, message):
    for mode in ("stock", "grid_sample"):
        enable(mode)
        with pytest.raises(ValueError, match=re.escape(message)):
            enable(**arguments)
        assert status().flags.pos_embed == mode
        assert is_pristine() == (mode == "stock")


@pytest.mark.filterwarnings("error")
def test_another_plugin_on_top_is_left_alone(monkeypatch):
    enable()
    ours = NaFlexEmbeds.__dict__[LEARNED]
    model = small_vit()
    theirs = lambda self, x, patch_coord: ours(self, x, patch_coord)
    with monkeypatch.context() as patched:  # which puts back what it found
        patched.setattr(NaFlexEmbeds, LEARNED, theirs)
        for mode in ("stock", "matmul", "stock", "grid_sample", "stock"):
            enable(mode)
            assert uses(model) == mode
            assert NaFlexEmbeds.__dict__[LEARNED] is theirs


@functools.wraps(STOCK_METHODS[LEARNED])
def spied(self, x, patch_coord):
    """Looks like what it wraps, and changes the result."""
    STOCK_METHODS[LEARNED](self, x, patch_coord)
    x.mul_(2)


@wrapt.decorator
def doubled(wrapped, _, args, options):
    wrapped(*args, **options)
    args[0].mul_(2)


@pytest.mark.parametrize(
    "other",
    [spied, mock.MagicMock(return_value=None), doubled(STOCK_METHODS[LEARNED])],
    ids=["spy", "mock", "proxy"],
)
@pytest.mark.parametrize("for_one", [False, True])
def test_what_another_has_put_on_before_stays_in_force_and_is_named(other, for_one, monkeypatch):
    model = small_vit()
    factorized = small_vit(pos_embed="factorized")
    decide.warned.clear()
    with monkeypatch.context() as patched:
        patched.setattr(NaFlexEmbeds, LEARNED, other)
        want = embed(model)
        named = f"NaFlexEmbeds.{LEARNED} is not the library's own"
        home = __name__ if other is spied else type(other).__module__
        by = f"{home}.{getattr(other, '__qualname__', 'MagicMock')}"
        with pytest.warns(
            UserWarning, match=rf"{named} but {by} and stays .*call enable\(\) before"
        ) as said:
            enable("grid_sample", model=model if for_one else None)
        assert said[0].filename == __file__
        assert torch.equal(embed(model), want)
        assert NaFlexEmbeds.__dict__[LEARNED] is other
        assert f"NaFlexEmbeds.{LEARNED}" not in status().replaced
        assert named in str(status())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            enable("matmul")  # said once
        embed(factorized)
        assert status().calls == {("pos_embed", "matmul"): 1}  # the other methods are replaced
        disable()
        assert NaFlexEmbeds.__dict__[LEARNED] is other
        assert torch.equal(embed(model), want)
        enable("matmul")
    assert f"NaFlexEmbeds.{LEARNED}" not in status().replaced  # it left; status() says what is
    enable("matmul")
    assert uses(model) == "matmul"
    assert f"NaFlexEmbeds.{LEARNED}" in status().replaced


@pytest.fixture
def no_subclass_stays():
    """Other tests would be told of it too."""
    yield
    gc.collect()


@pytest.mark.usefixtures("no_subclass_stays")
@pytest.mark.filterwarnings("error")
def test_strict_for_every_model_does_not_refuse_a_subclass_that_nobody_uses():
    calls = lambda self, x, patch_coord: NaFlexEmbeds._apply_learned_naflex_pos_embed(
        self, x, patch_coord
    )
    doubles = type("Doubles", (), {LEARNED: lambda self, x, patch_coord: x.mul_(2)})
    derived = (
        type("Derived", (doubles, NaFlexEmbeds), {}),
        type("Calls", (NaFlexEmbeds,), {LEARNED: calls}),
    )
    with enable(strict=True):
        assert uses(small_vit()) == "matmul"
    decide.warned.clear()
    with pytest.warns(UserWarning, match=f"Doubles.{LEARNED} is not the library's own") as said:
        enable()
    assert len(said) == 1
    assert f"Doubles.{LEARNED} is" in str(status())
    assert derived


@pytest.mark.usefixtures("no_subclass_stays")
def test_strict_for_every_model_refuses_a_subclass_that_a_model_uses():
    saved = vars(NaFlexEmbeds)[LEARNED]
    own = lambda self, x, patch_coord: saved(self, x, patch_coord)
    model = small_vit()
    model.embeds.__class__ = type("Saved", (NaFlexEmbeds,), {LEARNED: own})
    with pytest.raises(RuntimeError, match=f"Saved.{LEARNED} is .* Nothing was changed"):
        enable(strict=True)
    assert status().replaced == {}


@pytest.mark.usefixtures("no_subclass_stays")
@pytest.mark.parametrize("how", ["partial", "mock", "subclass"])
@pytest.mark.parametrize("strict", [False, True])
def test_what_an_instance_or_a_subclass_carries_is_named(how, strict):
    model = small_vit()
    other = small_vit()
    if how == "subclass":
        model.embeds.__class__ = type(
            "Overrides", (NaFlexEmbeds,), {LEARNED: lambda self, x, patch_coord: x.mul_(2)}
        )
    else:
        theirs = (
            functools.partial(lambda x, patch_coord: x.mul_(2))
            if how == "partial"
            else mock.MagicMock()
        )
        setattr(model.embeds, LEARNED, theirs)
    decide.warned.clear()
    where = "Overrides" if how == "subclass" else "one NaFlexEmbeds"
    named = f"{where}.{LEARNED} is not the library's own but"
    if strict:
        with pytest.raises(RuntimeError, match=f"{named} .* Nothing was changed"):
            enable(model=model, strict=True)
        assert is_pristine()
        assert status().models == ()
        return
    with pytest.warns(UserWarning, match=named):
        enable(model=model)
    assert named in str(status(model))
    assert f"NaFlexEmbeds.{LEARNED}" not in status(model).replaced
    embed(model)
    assert status().calls == {}
    enable(model=other)
    other.embeds.__dict__[LEARNED] = getattr(
        other.embeds, LEARNED
    )  # as a mock that has ended leaves it
    assert uses(other) == status(other).replaced[f"NaFlexEmbeds.{LEARNED}"] == "matmul"
    assert status().calls == {("pos_embed", "matmul"): 1}
    assert "library's own but" not in str(status(other))


@pytest.mark.skipif(OLD_TORCH, reason="transformers needs a newer torch")
def test_of_several_libraries_all_are_checked_before_the_first_is_changed(monkeypatch):
    siglip2 = pytest.importorskip("transformers.models.siglip2.modeling_siglip2")
    forward = lambda self, pixel_values, spatial_shapes, extra=None: None
    monkeypatch.setattr(siglip2.Siglip2VisionEmbeddings, "forward", defined_in(siglip2, forward))
    for order in (("timm", "transformers"), ("transformers", "timm")):
        with pytest.raises(RuntimeError, match=r"extra=None.*Nothing was changed"):
            enable(library=order)
        assert is_pristine()
        assert status().replaced == {}


def test_a_replaced_function_pickles_by_the_librarys_own_name():
    things = lambda: (patch_embed.resample_patch_embed, NaFlexEmbeds.__dict__[LEARNED])
    bound = patch_embed.PatchEmbedInterpolator((4, 4), 3, 5)
    with enable():
        data = pickle.dumps((*things(), bound.forward))
        keys = (patching_timm.FUNCTIONS, "resample_patch_embed"), (patching_timm.EMBEDS, LEARNED)
        assert pickle.loads(data)[:2] == tuple(
            patching_timm.REPLACEMENTS[key].function for key in keys
        )
    assert b"timm_naflex_fast" not in data
    assert pickle.loads(data)[:2] == things() == pickle.loads(pickle.dumps(things()))
    assert pickle.loads(data)[2].__func__ is PRISTINE[patch_embed.PatchEmbedInterpolator]["forward"]


def test_strict_raises_where_the_librarys_own_code_would_run():
    model = small_vit()
    other = small_vit()

    def transformed(model):
        def added(x):
            model.embeds._apply_learned_naflex_pos_embed(x.mul(1), torch.zeros(2, 6, 2))
            return x.sum()

        torch.func.grad(added)(torch.zeros(2, 6, 32))

    with enable(strict=True) as handle:
        assert uses(model) == "matmul"
        assert handle.flags.strict
        with pytest.raises(
            RuntimeError, match=r"a torch.func transform needs timm's own code.*strict=True"
        ):
            transformed(model)
        assert status().fallbacks == {}
        with enable(model=other):  # one model's own choice is not strict
            transformed(other)
            assert status().fallbacks == {"a torch.func transform": 1}
        with enable("stock", model=other):
            assert uses(other) == "stock"
    assert uses(model) == "stock"
    assert is_pristine()


@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
@pytest.mark.parametrize("count", [2, slow(3)])
def test_a_temporary_patch_anywhere_between_leaves_no_trace(count, monkeypatch):
    """A mock, as tests put it on: it keeps what it found, and puts that back."""
    model = small_vit()
    found = []

    def put_on():
        found.append(NaFlexEmbeds.__dict__[LEARNED])
        setattr(
            NaFlexEmbeds,
            LEARNED,
            lambda self, x, patch_coord, under=found[-1]: under(self, x, patch_coord),
        )

    def leave():
        if found:
            setattr(NaFlexEmbeds, LEARNED, found.pop())

    possible = (lambda: enable("grid_sample"), disable, put_on, leave)
    for steps in itertools.product(possible, repeat=count):
        for step in steps:
            step()
        embed(model)  # runs, whatever holds
        while found:
            leave()
        enable("grid_sample")
        assert uses(model) == "grid_sample", steps
        disable()
        assert is_pristine() and not library.in_place, steps
    monkeypatch.setattr(NaFlexEmbeds, f"{LEARNED}_grid_sample", spy := mock.Mock())
    with enable("grid_sample"):  # timm's method of the flag is called: the one that is there now
        model.embeds._apply_learned_naflex_pos_embed(
            torch.zeros(1, 2, 32), torch.tensor([[[0, 0], [0, -1]]])
        )
    assert spy.called


def test_a_reloaded_library_is_enabled_again_and_status_shows_the_loss(monkeypatch):
    """``importlib.reload`` defines the classes anew. One rule: call ``enable()`` again."""
    enable("grid_sample")
    old = small_vit()
    again = type("NaFlexEmbeds", (nn.Module,), PRISTINE[NaFlexEmbeds].copy())
    with monkeypatch.context() as reloaded:
        reloaded.setattr(naflexvit, "NaFlexEmbeds", again)
        assert f"NaFlexEmbeds.{LEARNED}" not in status().replaced
        with pytest.raises(ValueError, match="contains no timm NaFlexEmbeds"):
            enable("matmul", model=old.embeds)  # a model of before
        enable("grid_sample")
        assert f"NaFlexEmbeds.{LEARNED}" in status().replaced
        assert uses(old) == "grid_sample"
        assert (
            again.__dict__[LEARNED]
            is patching_timm.REPLACEMENTS[patching_timm.EMBEDS, LEARNED].function
        )
    disable()
    assert is_pristine()
    assert not library.in_place


def test_a_library_that_cannot_be_imported_is_missed_only_where_it_is_asked_for(monkeypatch):
    for home in {
        "transformers",
        *(home.partition(":")[0] for home, _ in transformers.LIBRARY.replacements),
    }:
        monkeypatch.setitem(sys.modules, home, None)
    with pytest.raises(RuntimeError, match="transformers cannot be imported"):
        enable(library="transformers")
    assert status().replaced == {}
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
    assert imported.index("timm") < imported.index("timm_naflex_fast.patching.timm")
    enable("matmul", model=model)
    enable(library="transformers"), enable("stock").restore(), disable(model)
    status(), status(model), disable()
