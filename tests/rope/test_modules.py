"""timm's rotary modules: which of them we read, what transforms meet, and what stays with timm."""

import pytest
import timm.layers.pos_embed_sincos as timms
import torch

from tests.support.oracles import relative
from tests.support.rotary import CLASSES, NEW_TIMM, as_tensor
from tests.support.whole_models import ROPE, batch_of, build
from timm_naflex_fast import enable
from timm_naflex_fast.rope import read_rope

if not CLASSES:
    pytest.skip("this timm's NaFlexVit has no rotary embeddings", allow_module_level=True)
BATCH = batch_of("axial", times=4)


@pytest.mark.parametrize("kind", ROPE)
def test_tracers_and_transforms_meet_plain_operations(kind):
    model = build(kind)
    coord = BATCH["patch_coord"]
    x = torch.zeros(*coord.shape[:2], 4)

    def embed(x, coord):
        return as_tensor(model._generate_rope_naflex(x, coord))

    with enable():
        want = embed(x, coord)
        by_sample = torch.func.vmap(lambda x, coord: embed(x[None], coord[None]))(x, coord)
        model.to("meta")
        got = embed(x.to("meta"), coord.to("meta"))

    assert got.shape == want.shape
    assert got.device.type == "meta"
    assert relative(by_sample, want.movedim(-4, 0).unsqueeze(-4)) <= 1e-5


class OtherRope(timms.RotaryEmbeddingCat):
    """A type that nobody knows."""


NAMESAKE = type("RotaryEmbeddingCat", (timms.RotaryEmbeddingCat,), {})  # but not timm's


def test_what_we_do_not_know_is_named():
    made = timms.RotaryEmbeddingCat
    centered = made(16, in_pixels=False)
    centered.grid_type = "centered"
    for rope, reason in (
        (centered, "grid_type='centered'"),
        (OtherRope(16, in_pixels=False), "type OtherRope"),
        (NAMESAKE(16, in_pixels=False), "type RotaryEmbeddingCat"),
        (made(16), "in_pixels=True"),
        (made(16, in_pixels=False, feat_shape=(3, 4)), "feat_shape=(3, 4)"),
    ):
        assert reason in read_rope(rope)


@pytest.mark.skipif(not NEW_TIMM, reason="NaFlexVit of older timm has no random coordinates")
def test_random_coordinates_stay_with_timm():
    model = build("axial", rope_shift_coords=0.3).train()

    def draw():
        torch.manual_seed(0)
        coord = BATCH["patch_coord"]
        return model._generate_rope_naflex(torch.zeros(*coord.shape[:2], 4), coord)

    message = "at random coordinates stays with timm's own code"
    with enable(), pytest.warns(UserWarning, match=message):
        got = draw()
    assert torch.equal(got, draw())
