"""timm's pipeline against transformers': right ones part nowhere, a setting that differs is named,
and what cannot be compared is said. ``compare``'s own tests plant faults in the towers."""

import json

import numpy as np
import pytest
import timm

from tests.support import tiny_recordings, tiny_siglip2
from tests.support.running import ran
from timm_naflex_fast import enable
from timm_naflex_fast.commands.measure import against
from timm_naflex_fast.commands.measure.pipelines import (
    build_processor,
    build_tower,
    stages_of,
    transformers_pipeline,
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
    model = timm.create_model(
        f"{tiny_siglip2.FAMILY}.v2_webli",
        num_classes=0,
        embed_dim=64,
        depth=2,
        num_heads=4,
        mlp_ratio=2,
        pos_embed_grid_size=(8, 8),
        pos_embed_interp_mode="bilinear",
    )
    model.load_state_dict(from_transformers(tiny_siglip2.tower().state_dict()))
    return model.eval()


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
    assert [row.stage for row in found["matmul"].rows] == STAGES[2:]
    assert found["stock"].first is found["matmul"].first is None
    assert found["grid_sample"].first.stage == "position_embedding"
    assert "antialiasing" in found["grid_sample"].reason.words


def test_mistakes_are_run_only_where_something_parts(model, compared, monkeypatch):
    monkeypatch.setattr(against, "with_mistakes", None)
    found = compared(model, same_patches=True)["stock"]
    assert [row.stage for row in found.rows] == STAGES[2:]
    with pytest.raises(TypeError):
        compared(model, interpolation="nearest")


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("pos_embed_interp_mode", "bicubic", "bicubic"),
        ("pos_embed_antialias", False, "bilinear without antialiasing"),
    ],
)
def test_the_setting_of_timms_table_that_differs_is_named(setting, value, reason, model, compared):
    setattr(model.embeds, setting, value)
    found = compared(model)["stock"]
    assert found.first.stage == "position_embedding"
    assert found.reason.words == f"the table is resized by {reason}"
    assert getattr(model.embeds, setting) == value


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
    tried = [one for one in against.mistakes_of(2) if one.start == "picture"]
    reference = against.with_mistakes(reference, model, pictures, tried)
    other = transformers.Siglip2ImageProcessor(max_num_patches=LENGTH, resample=3, **imagenet)
    inputs = transformers_pipeline(build_tower(model, {}), other).read(pictures)
    read = stages_of(inputs, {}, run=lambda: None)
    reason = tiny_recordings.compared(reference, read).reason
    assert reason.words.startswith("pictures resized by bicubic")


def test_pictures_that_are_not_resized_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match=r"preprocessor_config.json has do_resize false: .* valid"):
        transformers_source(model, LENGTH, save_processor(tmp_path, do_resize=False))


def test_transformers_own_code_is_measured_whatever_is_enabled(pictures):
    processor = transformers.Siglip2ImageProcessor(max_num_patches=LENGTH)
    pipeline = transformers_pipeline(tiny_siglip2.tower(), processor)
    inputs = pipeline.read(pictures)
    expected = pipeline.tower(inputs)
    with enable(library="transformers"):
        found = pipeline.tower(inputs)
    for stages, wanted in zip(found, expected):
        assert np.array_equal(stages["position_embedding"], wanted["position_embedding"])


def test_settings_beside_the_weights_are_followed(model, tmp_path):
    tower = build_tower(model, {"hidden_act": "relu", "dtype": "bfloat16"})
    assert tower.config.hidden_act == "relu"
    assert str(tower.dtype) == "torch.float32"
    assert tower.config.num_attention_heads == 4
    made, notes = build_processor(model, 32, tmp_path)
    assert (made.resample, made.max_num_patches, notes) == (2, 32, [])

    save_processor(tmp_path, resample=0, max_num_patches=9, patch_size=14)
    made, _ = build_processor(model, None, tmp_path)
    assert (made.resample, made.max_num_patches, made.patch_size) == (0, 9, 16)
    made, notes = build_processor(model, LENGTH, tmp_path)
    assert notes == [
        "preprocessor_config.json says patch_size 14, but 16 is taken",
        f"preprocessor_config.json says max_num_patches 9, but {LENGTH} is taken",
    ]
