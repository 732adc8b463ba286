"""Google's own release: the same tower as timm's, in both of big_vision's layouts."""

import numpy as np
import pytest
import timm
import torch

from tests.support.google_release import release
from tests.support.tiny_siglip2 import FAMILY
from timm_naflex_fast.commands.measure.checkpoints import read_checkpoint
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


@GOOGLES
@pytest.mark.parametrize("stacked", [False, True])
def test_googles_release_gives_the_same_model_and_tells_its_size(stacked, model, tmp_path):
    file = tmp_path / "siglip2_b16_naflex.npz"
    np.savez(file, **release(model, stacked))
    loaded, words = load_model(FAMILY, file)
    assert same(loaded, model) and loaded.blocks[0].attn.num_heads == 2
    assert words == "file siglip2_b16_naflex.npz: Google's image tower, 12 blocks, table 3 x 5"


@GOOGLES
def test_googles_release_is_read_as_timm_reads_it(model, tmp_path):
    np.savez(tmp_path / "release.npz", **release(model))
    own = timm.create_model(
        FAMILY, num_classes=0, embed_dim=64, depth=12, num_heads=2, pos_embed_grid_size=(3, 5)
    )
    own.load_pretrained(str(tmp_path / "release.npz"))
    loaded, _ = load_model(FAMILY, tmp_path / "release.npz")
    assert same(loaded, own)


@GOOGLES
def test_no_array_of_another_tower_is_read(model, tmp_path):
    text = np.array([object()])  # a pickle: whoever reads it gets an error
    np.savez(tmp_path / "release.npz", **release(model) | {"params/txt/Embed_0/embedding": text})
    assert len(read_checkpoint(tmp_path / "release.npz").tensors) > 100


@GOOGLES
def test_averages_of_googles_optimizer_are_no_second_tower(model, tmp_path):
    arrays = release(model)
    averages = {name.replace("params/", "opt/0/mu/"): 0 * array for name, array in arrays.items()}
    np.savez(tmp_path / "checkpoint.npz", **arrays | averages)
    assert same(load_model(FAMILY, tmp_path / "checkpoint.npz")[0], model)


def test_an_archive_of_something_else_is_an_error_that_says_what_it_is(tmp_path):
    np.savez(tmp_path / "stages.npz", pooled=np.ones(3), block_0=np.ones(2))
    says = r'Unexpected key\(s\) in state_dict: "pooled", "block_0".*; taken are .* or Google saves'
    with pytest.raises(RuntimeError, match=says):
        load_model(FAMILY, tmp_path / "stages.npz")


@GOOGLES
def test_an_array_that_timm_does_not_read_is_named(model, tmp_path):
    more = {"params/img/cls": np.ones((1, 1, 64), "f4")}
    np.savez(tmp_path / "release.npz", **release(model) | more)
    with pytest.raises(RuntimeError, match=r"found 1 arrays that are not SigLIP-2's \(cls\)"):
        load_model(FAMILY, tmp_path / "release.npz")


@pytest.mark.skipif(READS_GOOGLES, reason="this timm reads Google's form")
def test_an_older_timm_is_told(model, tmp_path):
    np.savez(tmp_path / "release.npz", **release(model))
    with pytest.raises(RuntimeError, match=r"which timm \S+ does not read: 1.0.31 does"):
        load_model(FAMILY, tmp_path / "release.npz")


@GOOGLES
def test_googles_tower_of_one_image_size_is_told(model, tmp_path):
    arrays = release(model)
    arrays["params/img/embedding/kernel"] = np.ones((16, 16, 3, 64), "f4")
    np.savez(tmp_path / "siglip2_b16_256.npz", **arrays)
    with pytest.raises(RuntimeError, match="weights of one size, not of NaFlex"):
        load_model(FAMILY, tmp_path / "siglip2_b16_256.npz")


@GOOGLES
def test_googles_tower_that_is_not_whole_is_an_error_with_numbers_and_names(model, tmp_path):
    arrays = release(model)
    del arrays["params/img/Transformer/encoderblock_1/LayerNorm_0/scale"]
    np.savez(tmp_path / "release.npz", **arrays)
    says = "KeyError: 'params/img/Transformer/encoderblock_1/LayerNorm_0/scale is not a file"
    with pytest.raises(RuntimeError, match=says):
        load_model(FAMILY, tmp_path / "release.npz")


@pytest.mark.skipif(not READS_GOOGLES, reason="this timm knows one order of a patch")
def test_a_model_with_channels_first_gets_the_tower_in_its_own_order(model, tmp_path):
    np.savez(tmp_path / "release.npz", **release(model))
    first, _ = load_model(FAMILY, tmp_path / "release.npz", patchify_channels_last=False)
    weight = first.embeds.proj.weight.unflatten(1, (3, 16, 16))
    assert torch.equal(weight.movedim(1, 3).flatten(1), model.embeds.proj.weight)


@GOOGLES
@pytest.mark.parametrize("mean", [None, (0.1, 0.2, 0.3)])
def test_a_setting_of_pictures_stays_beside_the_weights_of_a_file(mean, model, tmp_path):
    np.savez(tmp_path / "release.npz", **release(model))
    options = {"pretrained_cfg_overlay": {"mean": mean}} if mean else {}
    loaded, _ = load_model(FAMILY, tmp_path / "release.npz", **options)
    assert loaded.pretrained_cfg["mean"] == (mean or (0.5, 0.5, 0.5))
    assert same(loaded, model)


@pytest.mark.skipif(not READS_GOOGLES, reason="this timm knows one order of a patch")
def test_transformers_gets_the_tower_of_a_model_with_channels_first_in_its_own_order():
    pytest.importorskip("transformers")
    square = timm.create_model(
        FAMILY, num_classes=0, embed_dim=64, depth=1, num_heads=2, patchify_channels_last=False
    )
    theirs = build_tower(square, {}).state_dict()
    (name,) = [name for name in theirs if name.endswith("patch_embedding.weight")]
    assert torch.equal(channels_first(theirs[name]), square.embeds.proj.weight)


def test_an_archive_that_is_cut_off_is_to_be_fetched_again(model, tmp_path):
    np.savez(tmp_path / "a.npz", **release(model))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:9000])
    with pytest.raises(RuntimeError, match=r"found cut.npz, which cannot be read: BadZipFile"):
        load_model(FAMILY, tmp_path / "cut.npz")
