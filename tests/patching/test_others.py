"""Whoever wraps or saved a method: ours runs, or somebody says why not; what wraps ours is ours."""

import functools
import gc
import importlib
import re
import sys
import types

import pytest
import torch
from torch import nn

from tests.support.oracles import small_vit
from timm_naflex_fast import disable, enable, status

hooks = pytest.importorskip("accelerate.hooks")
transformers = pytest.importorskip("transformers", minversion="5.21")
if not transformers.is_torch_available():
    pytest.skip("this transformers needs a newer torch", allow_module_level=True)
siglip2 = pytest.importorskip("transformers.models.siglip2.modeling_siglip2")
LIBRARY = importlib.import_module("timm_naflex_fast.patching.transformers_methods").LIBRARY

pytestmark = pytest.mark.usefixtures("clean", "nothing_stays")
NAME = "Siglip2VisionEmbeddings.forward"


@pytest.fixture
def nothing_stays():
    """What a test wrapped is gone after it."""
    yield
    gc.collect()


def tower():
    """A small tower, and what it computes of a batch."""
    config = transformers.Siglip2VisionConfig(hidden_size=8, patch_size=4, num_patches=16)
    model = nn.Sequential(siglip2.Siglip2VisionEmbeddings(config))
    return model, lambda: model[0](torch.ones(2, 20, 48), torch.tensor([(3, 5), (4, 4)]))


def hooked(module):
    """As accelerate does for a ``device_map`` on one device."""
    hooks.add_hook_to_module(module, hooks.AlignDevicesHook(execution_device="cpu"))


def offloaded(module):
    """As for a part that lies on the host, and comes to the device for each call."""
    hook = hooks.AlignDevicesHook(execution_device="cpu", offload=True, place_submodules=True)
    hooks.add_hook_to_module(module, hook)


def partial(module):
    module.forward = functools.partial(module.forward)


def closed_over(module):
    old = module.forward
    module.forward = lambda *args: old(*args)


def method(module):
    old = type(module).forward
    module.forward = types.MethodType(lambda self, *args: old(self, *args), module)


def twice(module):
    hooked(module), partial(module), hooked(module)


WRAPPERS = [hooked, offloaded, partial, twice]
wrappers = pytest.mark.parametrize("wrap", WRAPPERS, ids=lambda wrap: wrap.__name__)
for_one_or_all = pytest.mark.parametrize("for_one", [False, True])


def chosen(model, for_one, **options):
    return enable(library="transformers", model=model if for_one else None, **options)


@pytest.mark.parametrize("leave_out", [torch.compiler.disable, torch._disable_dynamo])
def test_what_the_compiler_leaves_out_is_the_librarys_own(leave_out):
    forward = siglip2.Siglip2VisionEmbeddings.forward
    assert LIBRARY.wrote(leave_out(forward))
    assert not LIBRARY.wrote(leave_out(lambda: None))


@pytest.mark.parametrize("wrap", [*WRAPPERS, closed_over, method])
def test_what_was_wrapped_before_is_named_and_an_error_under_strict(wrap):
    model, run = tower()
    want = run()
    wrap(model[0])
    with pytest.warns(UserWarning, match=f"one {NAME} is .*call enable.. before"):
        handle = chosen(model, True)
    with pytest.warns(UserWarning, match=MISSED):
        assert torch.equal(run(), want)
    assert NAME in str(status(model).notes)
    assert NAME not in status(model).replaced
    handle.restore()
    with pytest.raises(RuntimeError, match=f"one {NAME} is .* Nothing was changed"):
        chosen(model, True, strict=True)
    assert status().replaced == {}


MISSED = "a Siglip2VisionEmbeddings.forward that was saved or wrapped before enable"


@pytest.mark.parametrize("wrap", [*WRAPPERS, closed_over])
def test_for_every_model_what_was_wrapped_before_is_named_at_its_first_call(wrap):
    """No search: the first call of a module that does not run ours tells."""
    model, run = tower()
    want = run()
    wrap(model[0])
    other, run_other = tower()
    with enable(library="transformers"):
        with pytest.warns(UserWarning, match=MISSED) as said:
            assert torch.equal(run(), want)
        assert said[0].filename == __file__
        ((reason, count),) = status().fallbacks.items()
        assert (count, status().calls) == (1, {("pos_embed", "stock"): 1})
        assert re.match(MISSED, reason)
        run_other()
        assert status().calls["pos_embed", "matmul"] == 1
        with enable("stock", model=model):  # exempt: that it runs its own code is as chosen
            run()
            assert status().calls == {}
    with enable(library="transformers", strict=True):
        with pytest.raises(RuntimeError, match=f"{MISSED}.*strict=True"):
            run()
        run_other()
    assert torch.equal(run(), want)
    assert other[0].resize_positional_embeddings is RESIZE


RESIZE = siglip2.Siglip2VisionEmbeddings.resize_positional_embeddings


@wrappers
@for_one_or_all
@pytest.mark.filterwarnings("error:timm_naflex_fast")
def test_what_wraps_ours_is_ours_and_ends_with_it(wrap, for_one):
    model, run = tower()
    want = run()
    with chosen(model, for_one, strict=True):
        wrap(model[0])
        torch.testing.assert_close(run(), want)
        assert status().calls == {("pos_embed", "matmul"): 1}
        assert status(model).replaced[NAME] == "matmul"
        assert status(model).notes == ()
    assert torch.equal(run(), want)
    assert status().replaced == {}
    assert status().calls == {}
    with chosen(model, for_one, strict=True):
        torch.testing.assert_close(run(), want)
        assert status().calls == {("pos_embed", "matmul"): 1}


def test_the_status_of_a_model_whose_library_is_not_patched_says_what_patches_it():
    model, run = tower()
    how = 'enable() patches timm, enable(library="transformers") patches transformers'
    nothing = "nothing is patched in this process (every model is stock)"
    assert str(status(model)).splitlines()[2:] == [f"{nothing}: {how}"]

    enable()
    missing = f"transformers is not patched: {how}"
    assert str(status(model)).splitlines()[2:] == [
        "nothing is replaced in this Sequential (patched in this process: timm)",
        missing,
    ]
    assert str(status()).splitlines()[-1] == missing
    assert status().patched == ("timm",)

    enable(library="transformers")  # as advised: both are patched
    assert status(model).notes == ()
    assert "is not patched" not in str(status())
    run()
    assert status().calls == {("pos_embed", "matmul"): 1}
    disable(), enable(library="transformers")
    assert str(status(small_vit())).splitlines()[-1] == f"timm is not patched: {how}"


def test_a_library_of_which_no_class_is_loaded_is_not_named(monkeypatch):
    enable()
    assert "transformers is not patched" in str(status())
    for path, _ in LIBRARY.replacements:
        monkeypatch.delitem(sys.modules, path.partition(":")[0])
    assert "transformers" not in str(status())
