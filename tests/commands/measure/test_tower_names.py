"""Google's own release, which timm reads: the same tower as timm's."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file

from tests.support.tiny_siglip2 import FAMILY
from timm_naflex_fast.commands.measure.models import load_model
from timm_naflex_fast.commands.measure.pipelines import siglip2_weights

READS_GOOGLES = tuple(map(int, timm.__version__.split(".")[:3])) >= (1, 0, 31)

GOOGLES = pytest.mark.skipif(not READS_GOOGLES, reason="this timm does not read Google's form")
WEIGHTS = Path(__file__).parents[3] / "ports" / "kit" / "weights"
SIZES = dict(embed_dim=32, depth=2, num_heads=4, patch_size=8, pos_embed_grid_size=(12, 12))


@GOOGLES
def test_googles_release_gives_the_same_model():
    loaded, words = load_model(FAMILY, WEIGHTS / "big_vision.npz", **SIZES)
    timms = load_file(WEIGHTS / "timm.safetensors")
    torch.testing.assert_close(dict(loaded.state_dict()), timms, rtol=0, atol=0)
    assert words == "file big_vision.npz"


@GOOGLES
def test_an_archive_that_is_not_googles_tower_is_an_error(tmp_path):
    np.savez(tmp_path / "release.npz", pooled=np.ones(3), block_0=np.ones(2))
    says = (
        r"did not find a supported JAX/Flax parameter layout.* or Google \(with timm 1.0.31\) saves"
    )
    with pytest.raises(RuntimeError, match=says):
        load_model(FAMILY, tmp_path / "release.npz", **SIZES)


@pytest.mark.skipif(not READS_GOOGLES, reason="this timm knows one order of a patch")
def test_a_tower_that_takes_patches_in_another_order_is_refused():
    model = timm.create_model(FAMILY, depth=1, patchify_channels_last=False)
    with pytest.raises(ValueError, match="leave patchify_channels_last out"):
        siglip2_weights(model)
