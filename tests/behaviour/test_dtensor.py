"""Tensors that are DTensors: a named error, and in a model timm's own code."""

import pytest
import torch
import torch.distributed as dist

from tests.support.oracles import first, small_vit
from timm_naflex_fast import enable, status
from timm_naflex_fast import functional as fast

tensor = pytest.importorskip("torch.distributed.tensor")
if not hasattr(tensor, "DTensor"):
    pytest.skip("torch < 2.5 has DTensor under another name", allow_module_level=True)

COORD = torch.cartesian_prod(torch.arange(5), torch.arange(7)).expand(3, -1, -1)


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_a_dtensor_is_a_named_error_that_says_what_to_give(mesh):
    tokens = torch.zeros(3, 35, 8)
    table = torch.randn(6, 5, 8)
    replicated = tensor.distribute_tensor(table, mesh, [tensor.Replicate()])
    with pytest.raises(ValueError, match=r"table is a DTensor; give table.to_local\(\)"):
        fast.add_pos_embed_(tokens, replicated, COORD)
    fast.add_pos_embed_(tokens, replicated.to_local(), COORD)


@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="this torch resizes no DTensor")
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@torch.no_grad()
def test_a_model_of_dtensors_is_left_to_timm(mesh, compiled):
    """One image: timm's own loop mixes DTensors with plain tensors, which of one number it may."""
    embeds = small_vit(patch_size=2, embed_dim=8, pos_embed_grid_size=(6, 5)).embeds
    patches = torch.randn(1, 35, 4)
    coord = COORD[:1]
    want = first(embeds(patches, patch_coord=coord))
    tensor.distribute_module(embeds, mesh)
    patches = tensor.distribute_tensor(patches, mesh, [tensor.Replicate()])
    run = torch.compile(embeds, backend="eager") if compiled else embeds

    with enable():
        got = first(run(patches, patch_coord=coord))
        assert set(status().fallbacks) == {"a tensor of the class DTensor"}

    torch.testing.assert_close(got.to_local(), want, atol=2e-6, rtol=0)
