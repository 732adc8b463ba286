"""Other packages: accelerate's hooks keep a ``forward``, and ours runs all the same."""

import pytest
import torch
from torch import nn

from timm_naflex_fast import enable, status

hooks = pytest.importorskip("accelerate.hooks")
transformers = pytest.importorskip("transformers", minversion="5.21")
if not transformers.is_torch_available():
    pytest.skip("this transformers needs a newer torch", allow_module_level=True)
siglip2 = pytest.importorskip("transformers.models.siglip2.modeling_siglip2")

pytestmark = pytest.mark.usefixtures("clean")
EMBEDDINGS = siglip2.Siglip2VisionEmbeddings
NAME = "Siglip2VisionEmbeddings.resize_positional_embeddings"


def tower():
    """A small tower, and what it computes of a batch."""
    config = transformers.Siglip2VisionConfig(hidden_size=8, patch_size=4, num_patches=16)
    model = nn.Sequential(EMBEDDINGS(config))
    return model, lambda: model[0](torch.ones(2, 20, 48), torch.tensor([(3, 5), (4, 4)]))


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
    given = dict(spatial_shapes=sizes, max_length=16, positional_embeddings=table)
    want = EMBEDDINGS.resize_positional_embeddings(**given)
    for mode in ("matmul", "stock"):
        with enable(library="transformers"), enable(mode, library="transformers"):
            got = EMBEDDINGS.resize_positional_embeddings(**given)
            assert status().calls == {("pos_embed", mode): 1}
        torch.testing.assert_close(got, want)
