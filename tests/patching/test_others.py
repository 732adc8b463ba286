"""Other packages: accelerate's hooks keep a ``forward``, and ours runs all the same; and libraries
that are not patched."""

import importlib
import sys

import pytest
import torch
from torch import nn

from timm_naflex_fast import enable, status

hooks = pytest.importorskip("accelerate.hooks")
transformers = pytest.importorskip("transformers", minversion="5.21")
if not transformers.is_torch_available():
    pytest.skip("this transformers needs a newer torch", allow_module_level=True)
siglip2 = pytest.importorskip("transformers.models.siglip2.modeling_siglip2")
LIBRARY = importlib.import_module("timm_naflex_fast.patching.transformers_methods").LIBRARY

pytestmark = pytest.mark.usefixtures("clean")
EMBEDDINGS = siglip2.Siglip2VisionEmbeddings
NAME = "Siglip2VisionEmbeddings.resize_positional_embeddings"


def tower():
    """A small tower, and what it computes of a batch."""
    config = transformers.Siglip2VisionConfig(hidden_size=8, patch_size=4, num_patches=16)
    model = nn.Sequential(EMBEDDINGS(config))
    return model, lambda: model[0](torch.ones(2, 20, 48), torch.tensor([(3, 5), (4, 4)]))


@pytest.mark.parametrize("leave_out", [torch.compiler.disable, torch._disable_dynamo])
def test_what_the_compiler_leaves_out_is_the_librarys_own(leave_out):
    assert LIBRARY.wrote(leave_out(EMBEDDINGS.forward))
    assert not LIBRARY.wrote(leave_out(lambda: None))


@pytest.mark.parametrize("for_one", [False, True])
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.filterwarnings("error:timm_naflex_fast")
def test_a_device_map_before_and_after(before, offload, for_one):
    """accelerate's hooks for a part on one device, or on the host between calls: they keep the
    bound ``forward`` that they find."""
    model, run = tower()
    want = run()
    hook = hooks.AlignDevicesHook("cpu", offload=offload, place_submodules=True)
    chosen = dict(library="transformers", model=model if for_one else None, strict=True)
    if before:
        hooks.add_hook_to_module(model[0], hook)
    for _ in range(2):
        with enable(**chosen):
            if not hasattr(model[0], "_hf_hook"):
                hooks.add_hook_to_module(model[0], hook)
            torch.testing.assert_close(run(), want)
            assert status().calls == {("pos_embed", "matmul"): 1}
            assert status(model).replaced == {NAME: "matmul"}
            assert status(model).notes == ()
        assert torch.equal(run(), want)
        assert status().calls == {}


def test_a_static_method_is_also_called_on_its_class():
    table = torch.randn(4, 4, 8)
    sizes = torch.tensor([(3, 5), (4, 4)])
    want = EMBEDDINGS.resize_positional_embeddings(table, sizes, 16)
    for mode in ("matmul", "stock"):
        with enable(library="transformers"), enable(mode, library="transformers"):
            got = EMBEDDINGS.resize_positional_embeddings(
                spatial_shapes=sizes, max_length=16, positional_embeddings=table
            )
            assert status().calls == {("pos_embed", mode): 1}
        torch.testing.assert_close(got, want)


def test_the_status_of_a_model_whose_library_is_not_patched_says_what_patches_it():
    model, _ = tower()
    how = 'enable() patches timm, enable(library="transformers") patches transformers'
    nothing = f"nothing is replaced: {how}"
    missing = f"transformers is not patched: {how}"
    assert str(status(model)).splitlines()[2:] == [nothing]
    enable()
    assert str(status(model)).splitlines()[2:] == [nothing, missing]
    assert str(status()).splitlines()[-1] == missing

    enable(library="transformers")  # as advised: both are patched
    assert status(model).notes == ()
    assert "is not patched" not in str(status())


def test_a_library_of_which_no_class_is_loaded_is_not_named(monkeypatch):
    enable()
    assert "transformers is not patched" in str(status())
    for path, _ in LIBRARY.replacements:
        monkeypatch.delitem(sys.modules, path.partition(":")[0])
    assert "transformers" not in str(status())
