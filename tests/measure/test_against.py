"""timm's pipeline against transformers': right ones part nowhere, a setting of timm that differs is
named, and what cannot be compared is said."""

import pytest
import timm
import torch

from tests.support import tiny_recordings, tiny_siglip2
from tests.support.running import ran
from timm_naflex_fast import enable
from timm_naflex_fast.measure import against
from timm_naflex_fast.measure.pipelines import build_processor, build_tower, transformers_pipeline
from timm_naflex_fast.measure.tower_names import from_transformers

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
        return against.against_transformers(model, [pictures], contenders=contenders, **settings)

    return compared


@ran("matmul", "interpolate_cached")
def test_right_pipelines_part_nowhere_with_exact_modes(model, compared):
    found = compared(model, ["interpolate_cached", "matmul"])
    assert found.reason is None
    for one in [found, *found.modes.values()]:
        assert one.first is None
        assert [row.stage for row in one.stages] == [*STAGES, END_TO_END]
        assert {row.parting for row in one.stages} == {()}
        assert one.stages[0].largest == 0
    limits = [row.limit for row in found.stages]
    grid, pixels, patches, positions, *later, end_to_end = limits
    # The position embedding is a difference of two stages.
    assert (grid, patches, positions, {*later}) == (0, 2e-6, 4e-6, {2e-5})
    assert pixels == pytest.approx(2.01 * 2 / 255)
    assert end_to_end == float("inf")


def test_several_batches_are_one_comparison(model, pictures):
    found = against.against_transformers(
        model, [pictures[:3], pictures[3:]], contenders=[], max_seq_len=LENGTH
    )
    assert found.pictures == 4
    assert {row.compared for row in found.stages} == {4}
    pixels = found.stages[1]
    assert pixels.parting == (0, 1, 2, 3)


def test_the_verdict_shows_the_same_pixels_and_the_end_to_end_numbers(model, compared):
    found = compared(model)
    *_, pooled, end_to_end = found.stages
    assert 0 < pooled.share < end_to_end.share
    assert found.verdict.endswith(
        f"part nowhere on 4 pictures in float32: from the same pixels, pooled differs by "
        f"{pooled.share:.1e} of its largest number; end to end, from each one's own pixels, by "
        f"{end_to_end.share:.1e}."
    )


def test_from_the_same_patches_there_is_no_end_to_end_number(model, compared):
    found = compared(model, same_patches=True)
    assert [row.stage for row in found.stages] == STAGES[2:]
    assert found.stage_from == "patches"
    assert "end to end" not in found.verdict


@pytest.mark.parametrize("known", [True, False])
def test_a_guessed_number_of_heads_is_said(known, model, compared):
    found = compared(model, heads_are_known=known)
    assert ("The number of attention heads is not known" in found.verdict) == (not known)


@ran("grid_sample")
def test_a_mode_that_does_not_antialias_is_named(model, compared):
    found = compared(model, ["grid_sample"], same_patches=True)
    assert found.first is None
    assert found.modes["grid_sample"].first == "position_embedding"
    assert "With grid_sample they part at position_embedding" in found.verdict


def test_timms_own_filter_of_pictures_is_named(model, compared):
    found = compared(model, interpolation="bicubic")
    assert found.first == "pixels"
    assert found.reason == "pictures resized by bicubic"
    assert "the likely reason: pictures resized by bicubic" in found.verdict


@pytest.mark.parametrize(("interpolation", "first"), [("bilinear", None), ("bicubic", "pixels")])
def test_square_pictures_of_320_pixels_at_256_patches(interpolation, first, model):
    # 320 to 256 pixels: nearly each number is rounded twice, in two places.
    square = tiny_recordings.smooth_pictures([(320, 320)] * 2)
    found = against.against_transformers(
        model, [square], contenders=[], max_seq_len=256, interpolation=interpolation
    )
    assert found.first == first
    reason = None if first is None else f"pictures resized by {interpolation}"
    assert found.reason == reason


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("pos_embed_interp_mode", "bicubic", "the table is resized by bicubic"),
        ("pos_embed_antialias", False, "the table is resized by bilinear without antialiasing"),
    ],
)
def test_the_setting_of_timms_table_that_differs_is_named(setting, value, reason, model, compared):
    setattr(model.embeds, setting, value)
    found = compared(model)
    assert (found.first, found.reason) == ("position_embedding", reason)
    assert getattr(model.embeds, setting) == value


# Faults planted in transformers' tower or its processor: the stage, and the reason.


def bicubic_pixels(tower, processor):
    processor.resample = 3


def transposed_table(tower, processor):
    table = tower.embeddings.position_embedding.weight
    table.data = table.data.view(8, 8, 64).transpose(0, 1).reshape(64, 64)


def quick_gelu(tower, processor):
    for mlp in [*(layer.mlp for layer in tower.encoder.layers), tower.head.mlp]:
        mlp.activation_fn.forward = lambda x: x * torch.sigmoid(1.702 * x)


def one_block_left_out(tower, processor):
    tower.encoder.layers[1].forward = lambda tokens, *given, **more: tokens


def one_number_changed(tower, processor):
    with torch.no_grad():
        tower.encoder.layers[1].mlp.fc1.weight[3, 5] += 0.1


def no_mask_in_the_pooling_head(tower, processor):
    head = tower.head.forward
    tower.head.forward = lambda tokens, mask: head(tokens, None)


IN_TRANSFORMERS = "transformers gives what timm would with this: "
FAULTS = {
    bicubic_pixels: ("pixels", "pictures resized by bilinear"),
    transposed_table: ("position_embedding", f"{IN_TRANSFORMERS}the table is read transposed"),
    quick_gelu: ("block_0", f"{IN_TRANSFORMERS}quick GELU, x * sigmoid(1.702 x)"),
    one_block_left_out: ("block_1", f"{IN_TRANSFORMERS}block 1 is left out"),
    one_number_changed: ("block_1", None),
    no_mask_in_the_pooling_head: (
        "pooled",
        f"{IN_TRANSFORMERS}padding is not masked in the pooling",
    ),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_planted_in_transformers_is_named_at_its_stage(fault, model, compared, monkeypatch):
    tower, processor = build_tower(model, {}), build_processor(model, LENGTH)
    fault(getattr(tower, "vision_model", tower), processor)
    monkeypatch.setattr(against, "build_tower", lambda *given: tower)
    monkeypatch.setattr(against, "build_processor", lambda *given: processor)
    found = compared(model)
    stage, reason = FAULTS[fault]
    assert found.first == stage
    if reason is None:
        assert "(no known mistake gives these numbers" in found.reason
    else:
        assert found.reason == reason


def test_a_setting_of_timms_tower_that_differs_is_named(model, compared, monkeypatch):
    tower = build_tower(model, {})
    monkeypatch.setattr(against, "build_tower", lambda *given: tower)
    for mlp in [*(block.mlp for block in model.blocks), model.attn_pool.mlp]:
        mlp.act.forward = lambda x: x * torch.sigmoid(1.702 * x)
    found = compared(model)
    assert found.first == "block_0"
    told = f"{IN_TRANSFORMERS}GELU's approximation by tanh, not the exact one"
    assert found.reason == told


def test_a_classifier_of_its_own_does_not_matter(model, compared):
    model.reset_classifier(3)
    found = compared(model)
    assert found.first is None
    assert found.stages[-2].stage == "pooled"


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
        against.against_transformers(other, [pictures])


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
