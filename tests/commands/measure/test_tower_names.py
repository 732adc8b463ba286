"""Google's own release: the same tower as timm's, in both of big_vision's layouts."""

import numpy as np
import pytest
import timm
import torch

from tests.support.google_release import release
from tests.support.tiny_siglip2 import FAMILY
from timm_naflex_fast.commands.measure.models import load_model
from timm_naflex_fast.commands.measure.pipelines import build_tower
from timm_naflex_fast.commands.measure.tower_names import channels_first

READS_GOOGLES = tuple(map(int, timm.__version__.split(".")[:3])) >= (1, 0, 31)

GOOGLES = pytest.mark.skipif(not READS_GOOGLES, reason="this timm does not read Google's form")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = dict(embed_dim=64, depth=12, num_heads=2, pos_embed_grid_size=(3, 5))
    model = timm.create_model(FAMILY, num_classes=0, **sizes)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def same(one, other):
    one, other = one.state_dict(), other.state_dict()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def averages(arrays):
    """What big_vision's optimizer writes: no second tower."""
    return {name.replace("params/", "opt/0/mu/"): 0 * array for name, array in arrays.items()}


# What stands beside the tower; whoever reads the text tower's, a pickle, gets an error.
BESIDE = {
    "nothing": lambda arrays: {},
    "a text tower": lambda arrays: {"params/txt/Embed_0/embedding": np.array([object()])},
    "averages": averages,
}


@GOOGLES
@pytest.mark.parametrize(
    ("stacked", "beside"), [(True, "nothing"), *((False, name) for name in BESIDE)]
)
def test_googles_release_gives_the_same_model_and_its_size(stacked, beside, model, tmp_path):
    arrays = release(model, stacked)
    np.savez(tmp_path / "siglip2_b16_naflex.npz", **arrays | BESIDE[beside](arrays))
    loaded, words = load_model(FAMILY, tmp_path / "siglip2_b16_naflex.npz")
    assert same(loaded, model) and loaded.blocks[0].attn.num_heads == 2
    assert words == "file siglip2_b16_naflex.npz: Google's image tower"


SCALE = "params/img/Transformer/encoderblock_1/LayerNorm_0/scale"
KERNEL = "params/img/embedding/kernel"
WRONG = {
    r'Unexpected key\(s\) in state_dict: "pooled", "block_0".*; taken are .* or Google \(with timm 1.0.31\) saves': (
        lambda arrays: {"pooled": np.ones(3), "block_0": np.ones(2)}
    ),
    "weights of one size, not of NaFlex": (
        lambda arrays: arrays | {KERNEL: np.ones((16, 16, 3, 64), "f4")}
    ),
    f"KeyError: '{SCALE} is not a file": (
        lambda arrays: {name: arrays[name] for name in arrays if name != SCALE}
    ),
}


@GOOGLES
@pytest.mark.parametrize("says", WRONG)
def test_an_archive_that_is_not_googles_tower_is_an_error_with_names(says, model, tmp_path):
    np.savez(tmp_path / "release.npz", **WRONG[says](release(model)))
    with pytest.raises(RuntimeError, match=says):
        load_model(FAMILY, tmp_path / "release.npz", depth=2, embed_dim=64, num_heads=2)


@pytest.mark.skipif(READS_GOOGLES, reason="this timm reads Google's form")
def test_an_older_timm_is_told(model, tmp_path):
    np.savez(tmp_path / "release.npz", **release(model))
    with pytest.raises(RuntimeError, match=r"taken are .*Google \(with timm 1.0.31\)"):
        load_model(FAMILY, tmp_path / "release.npz")


@pytest.mark.skipif(not READS_GOOGLES, reason="this timm knows one order of a patch")
def test_a_model_with_channels_first_gets_the_tower_in_its_own_order(model, tmp_path):
    np.savez(tmp_path / "release.npz", **release(model))
    first, _ = load_model(FAMILY, tmp_path / "release.npz", patchify_channels_last=False)
    weight = first.embeds.proj.weight.unflatten(1, (3, 16, 16))
    assert torch.equal(weight.movedim(1, 3).flatten(1), model.embeds.proj.weight)


@pytest.mark.skipif(not READS_GOOGLES, reason="this timm knows one order of a patch")
def test_transformers_gets_the_tower_of_a_model_with_channels_first_in_its_own_order():
    pytest.importorskip("transformers")
    square = timm.create_model(
        FAMILY, num_classes=0, embed_dim=64, depth=1, num_heads=2, patchify_channels_last=False
    )
    theirs = build_tower(square, {}).state_dict()
    (name,) = [name for name in theirs if name.endswith("patch_embedding.weight")]
    assert torch.equal(channels_first(theirs[name]), square.embeds.proj.weight)
