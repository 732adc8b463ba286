"""What a forward may run under: fake tensors, empty batches."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.oracles import row_major, small_vit, tables
from timm_naflex_fast import enable, status

pytestmark = pytest.mark.usefixtures("clean")

COORD = row_major([(2, 3)])
# timm's grid_sample flag is for NaFlex batches, so plain images are left to timm.
ON_IMAGES = {"matmul": "matmul", "interpolate_cached": "interpolate_cached", "grid_sample": "stock"}


def first(out):
    return out[0] if isinstance(out, tuple) else out


@pytest.fixture
def embeds():
    return small_vit(enable_patch_interpolator=True).embeds.requires_grad_(False)


@pytest.mark.parametrize("mode", ON_IMAGES)
@pytest.mark.parametrize("inside", ["fake", "make_fx"])
def test_fake_tensors_work_and_poison_nothing(embeds, mode, inside):
    image, patches = torch.randn(2, 1, 24, 28), torch.randn(1, 6, 3, 5, 1)
    want, want_patches = first(embeds(image)), first(embeds(patches, patch_coord=COORD))
    enable(mode)
    for _ in range(2):
        if inside == "fake":
            with FakeTensorMode(allow_non_fake_inputs=True) as fake:
                assert first(embeds(fake.from_tensor(image))).shape == want.shape
                weight = fake.from_tensor(embeds.proj.weight)
                assert embeds.patch_interpolator.resample_linear_weight(weight, (3, 5)).shape == (32, 15)
        else:
            trace = make_fx(lambda x: first(embeds(x)), tracing_mode="fake", _allow_non_fake_inputs=True)
            torch.testing.assert_close(trace(image)(image), want, atol=2e-6, rtol=0)
        torch.testing.assert_close(first(embeds(image)), want, atol=5e-6, rtol=0)
    if mode != "grid_sample":
        torch.testing.assert_close(first(embeds(patches, patch_coord=COORD)), want_patches, atol=5e-6, rtol=0)
    assert ("pos_embed", ON_IMAGES[mode]) in status().calls
    assert inside != "fake" or ("patch_embed", "matmul") in status().calls


@pytest.mark.parametrize("mode", ON_IMAGES)
def test_empty_batches_keep_the_graph(mode):
    enable(mode)
    for kind in ("learned", "factorized"):
        embeds = small_vit(pos_embed=kind).embeds
        embeds.proj.requires_grad_(False)
        first(embeds(torch.zeros(0, 1, 24, 28))).sum().backward()
        assert all((table.grad == 0).all() for table in tables(embeds))
    assert status().calls == {("pos_embed", ON_IMAGES[mode]): 2}
