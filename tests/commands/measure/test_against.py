"""timm's pipeline against transformers': right ones part nowhere, a setting that differs is named,
and what cannot be compared is said. ``compare``'s own tests plant faults in the towers."""

import json

import numpy as np
import pytest
from vit_ports.compare import compare_recordings

from tests.support import tiny_recordings, tiny_siglip2
from tests.support.running import ran
from timm_naflex_fast import enable
from timm_naflex_fast.commands.measure import against
from timm_naflex_fast.commands.measure.pipelines import (
    build_processor,
    build_tower,
    siglip2_weights,
    transformers_source,
)
from timm_naflex_fast.commands.measure.tower_names import from_transformers

transformers = pytest.importorskip("transformers")
pytest.importorskip("torchvision")

LENGTH = 64  # patches
# (height, width): the first fills 8 x 8 patches, the others are padded.
SIZES = ((200, 200), (300, 180), (64, 640), (151, 233))
STAGES = "grid pixels patch_embedding position_embedding block_0 block_1 norm pooled".split()


@pytest.fixture(scope="module")
def pictures():
    return tiny_recordings.smooth_pictures(SIZES)


@pytest.fixture
def model():
    """timm's tower with a tiny Siglip2's weights; each test may spoil its own."""
    sizes = dict(embed_dim=64, depth=2, patch_size=16, pos_embed_grid_size=(8, 8))
    model = tiny_recordings.tiny_model(**sizes)
    model.load_state_dict(from_transformers(tiny_siglip2.tower().state_dict()))
    return model


@pytest.fixture
def compared(pictures):
    """``against_transformers`` on the pictures, with the right filter of the resize."""

    def compared(model, contenders=(), folder=None, interpolation="bilinear", **options):
        source = transformers_source(model, LENGTH, folder)
        return against.against_transformers(
            source, pictures, contenders=contenders, interpolation=interpolation, **options
        )

    return compared


@ran("matmul", "grid_sample")
def test_right_pipelines_part_nowhere_and_a_mode_that_does_not_antialias_is_named(model, compared):
    found = compared(model, ["matmul", "grid_sample"])
    assert [row.stage for row in found["stock"].rows] == STAGES
    assert found["stock"].first is found["matmul"].first is None
    assert found["grid_sample"].first.stage == "position_embedding"
    assert "antialiasing" in found["grid_sample"].reason.words


def test_mistakes_are_run_only_where_something_parts(model, compared, monkeypatch):
    monkeypatch.setattr(against, "with_mistakes", None)
    found = compared(model, same_patches=True)["stock"]
    assert max(row.share for row in found.rows[:2]) == 0
    with pytest.raises(TypeError):
        compared(model, interpolation="nearest")


def save_processor(folder, **settings):
    processor = transformers.Siglip2ImageProcessor(max_num_patches=LENGTH).to_dict()
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | settings))
    return folder


NORMALIZED_OTHERWISE = {
    "ImageNet": dict(image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225]),
    "not normalized": dict(do_normalize=False),
    "rescaled by 256": dict(rescale_factor=1 / 256),
    "mean of 127": dict(image_mean=[127 / 255] * 3),
}


@pytest.mark.parametrize("name", NORMALIZED_OTHERWISE)
def test_another_normalization_is_named_and_no_filter(name, model, compared, tmp_path):
    folder = save_processor(tmp_path, **NORMALIZED_OTHERWISE[name])
    found = compared(model, folder=folder)["stock"]
    assert found.first.stage == "pixels"
    assert found.reason.words == "mean and standard deviation are 0.5: pixels from -1 to 1"


def test_mistakes_of_the_resize_are_made_with_the_processors_own_numbers(model, pictures, tmp_path):
    imagenet = NORMALIZED_OTHERWISE["ImageNet"]
    source = transformers_source(model, LENGTH, save_processor(tmp_path, **imagenet))
    reference = against.make_recording(source, pictures, [""] * 4, {})
    tried = [one for one in against.mistakes_of(2) if one.name in ("bicubic", "nearest")]
    reference = against.with_mistakes(reference, siglip2_weights(model), pictures, tried)
    other = transformers_source(model, LENGTH, save_processor(tmp_path, resample=3, **imagenet))
    reason = compare_recordings(reference, other.read(pictures)).reason
    assert reason.words == "pictures resized by bicubic"


def test_transformers_own_code_is_measured_whatever_is_enabled(model, pictures):
    source = transformers_source(model, LENGTH)
    given = source.read(pictures[1:2])
    (expected,) = source.tower(given)
    with enable(library="transformers"):
        (found,) = source.tower(given)
    assert np.array_equal(found["position_embedding"], expected["position_embedding"])


def test_settings_beside_the_weights_are_followed(model, tmp_path):
    tower = build_tower(model, {"hidden_act": "relu", "dtype": "bfloat16"})
    assert (tower.config.hidden_act, str(tower.dtype)) == ("relu", "torch.float32")
    assert build_processor(model, 32, tmp_path).resample == 2
    save_processor(tmp_path, resample=0, max_num_patches=9, patch_size=14)
    made = build_processor(model, None, tmp_path)
    assert (made.resample, made.max_num_patches, made.patch_size) == (0, 9, 16)
    source = transformers_source(model, LENGTH, tmp_path)
    assert f"(patch_size 16, max_num_patches {LENGTH}, 4 attention heads)" in source.words
