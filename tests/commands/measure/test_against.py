"""timm's pipeline against transformers': right ones part nowhere, a setting of timm that differs is
named, and what cannot be compared is said."""

import pytest
import timm
import torch

from tests.support import tiny_recordings, tiny_siglip2
from tests.support.running import ran
from timm_naflex_fast import enable
from timm_naflex_fast.commands.measure import against
from timm_naflex_fast.commands.measure.pipelines import (
    build_processor,
    build_tower,
    transformers_pipeline,
)
from timm_naflex_fast.commands.measure.tower_names import from_transformers

pytest.importorskip("transformers")
pytest.importorskip("torchvision")

LENGTH = 64  # patches
# (height, width): the first fills 8 x 8 patches, the others are padded.
SIZES = ((200, 200), (300, 180), (64, 640), (151, 233))
STAGES = "grid pixels patch_embedding position_embedding block_0 block_1 norm pooled".split()
END_TO_END = "pooled (end to end)"


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

    def compared(model, contenders=(), **options):
        settings = {"max_seq_len": LENGTH, "interpolation": "bilinear", **options}
        return against.against_transformers(model, pictures, contenders=contenders, **settings)

    return compared


@ran("matmul", "interpolate_cached")
def test_right_pipelines_part_nowhere_with_exact_modes(model, compared):
    found = compared(model, ["interpolate_cached", "matmul"])
    for one in found.values():
        assert one.first is None
    assert [row.stage for row in found["stock"].rows] == [*STAGES, END_TO_END]
    assert [row.stage for row in found["matmul"].rows] == STAGES[2:]
    limits = [row.limit for row in found["stock"].rows]
    grid, pixels, patches, positions, *later, end_to_end = limits
    # The position embedding is a difference of two stages.
    assert (grid, patches, positions, {*later}) == (0, 2e-6, 4e-6, {2e-5})
    assert pixels == pytest.approx(2.01 * 2 / 255)
    assert end_to_end == float("inf")


def test_from_the_same_patches_there_is_no_end_to_end_number(model, compared):
    found = compared(model, same_patches=True)["stock"]
    assert [row.stage for row in found.rows] == STAGES[2:]


@ran("grid_sample")
def test_a_mode_that_does_not_antialias_is_named(model, compared):
    found = compared(model, ["grid_sample"], same_patches=True)
    assert found["stock"].first is None
    assert found["grid_sample"].first.stage == "position_embedding"
    assert found["grid_sample"].reason.words == (
        "the table is resized by bilinear without antialiasing"
    )


def test_timms_own_filter_of_pictures_is_named(model, compared):
    found = compared(model, interpolation="bicubic")["stock"]
    assert found.first.stage == "pixels"
    assert found.reason.words == "pictures resized by bicubic"


@pytest.mark.parametrize(("interpolation", "first"), [("bilinear", None), ("bicubic", "pixels")])
def test_square_pictures_of_320_pixels_at_256_patches(interpolation, first, model):
    # 320 to 256 pixels: nearly each number is rounded twice, in two places.
    square = tiny_recordings.smooth_pictures([(320, 320)] * 2)
    found = against.against_transformers(
        model, square, contenders=[], max_seq_len=256, interpolation=interpolation
    )["stock"]
    assert (found.first and found.first.stage) == first
    reason = None if first is None else f"pictures resized by {interpolation}"
    assert (found.reason and found.reason.words) == reason


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("pos_embed_interp_mode", "bicubic", "the table is resized by bicubic"),
        ("pos_embed_antialias", False, "the table is resized by bilinear without antialiasing"),
    ],
)
def test_the_setting_of_timms_table_that_differs_is_named(setting, value, reason, model, compared):
    setattr(model.embeds, setting, value)
    found = compared(model)["stock"]
    assert (found.first.stage, found.reason.words) == ("position_embedding", reason)
    assert getattr(model.embeds, setting) == value


def test_a_classifier_of_its_own_does_not_matter(model, compared):
    model.reset_classifier(3)
    found = compared(model)["stock"]
    assert found.first is None
    assert found.rows[-2].stage == "pooled"


def test_transformers_own_code_is_measured_whatever_is_enabled(pictures):
    tower = tiny_siglip2.tower()
    from transformers import Siglip2ImageProcessor

    pipeline = transformers_pipeline(tower, Siglip2ImageProcessor(max_num_patches=LENGTH))
    inputs = pipeline.read(pictures)
    expected = pipeline.tower(inputs)["position_embedding"]
    with enable(library="transformers"):
        found = pipeline.tower(inputs)["position_embedding"]
    assert torch.equal(found, expected)


def test_what_cannot_be_compared_is_said(pictures):
    other = timm.create_model("naflexvit_base_patch16_gap", embed_dim=24, depth=1, num_heads=2)
    with pytest.raises(
        ValueError, match=r"2 tensors of Siglip2's tower are not in it \['norm.bias', 'norm.w"
    ):
        against.against_transformers(other, pictures)


def test_settings_beside_the_weights_are_followed(model, tmp_path):
    from transformers import Siglip2ImageProcessor

    tower = build_tower(model, {"hidden_act": "relu", "dtype": "bfloat16"})
    assert tower.config.hidden_act == "relu"
    assert tower.dtype == torch.float32
    assert tower.config.num_attention_heads == 4
    assert build_processor(model, LENGTH, tmp_path).resample == 2
    Siglip2ImageProcessor(resample=0, max_num_patches=9).save_pretrained(tmp_path)
    made = build_processor(model, LENGTH, tmp_path)
    assert (made.resample, made.max_num_patches) == (0, LENGTH)


def test_settings_of_another_tower_are_told_in_a_line(model):
    with pytest.raises(RuntimeError, match=r"config\.json must be that of the weights") as error:
        build_tower(model, {"num_patches": 256})
    assert "\n" not in str(error.value)
