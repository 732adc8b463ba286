"""Two pipelines from picture to embedding: right ones part nowhere, a planted fault is found at its
stage, and its reason where a change of one thing can prove it."""

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm_naflex_fast.measure.stages import (
    EMBEDDINGS,
    LATER,
    Comparison,
    Inputs,
    Pipeline,
    refer,
)

from tests.support import tiny_siglip2
from tests.support.running import ran
from timm_naflex_fast import enable
from timm_naflex_fast.measure import against
from timm_naflex_fast.measure.tower_names import from_transformers

pytest.importorskip("transformers")
pytest.importorskip("torchvision")

LENGTH = 64  # patches
# (height, width): the first fills 8 x 8 patches, the others are padded.
SIZES = ((200, 200), (300, 180), (64, 640), (151, 233))


def smooth_picture(height, width):
    """Colours that change within a few pixels: what two filters see otherwise."""
    noise = np.random.default_rng(0).integers(50, 200, (height // 4, width // 4, 3), np.uint8)
    return Image.fromarray(noise).resize((width, height))


@pytest.fixture(scope="module")
def pictures():
    return [smooth_picture(*size) for size in SIZES]


@pytest.fixture
def tower():
    """transformers' tower; each test may spoil its own."""
    return tiny_siglip2.tower()


@pytest.fixture
def model(tower):
    """timm's tower with the same weights; its data configuration is SigLIP-2's."""
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
    model.load_state_dict(from_transformers(tower.state_dict()))
    return model.eval()


def processor(max_num_patches=LENGTH, **options):
    from transformers import Siglip2ImageProcessor

    return Siglip2ImageProcessor(max_num_patches=max_num_patches, **options)


# Faults, planted on transformers' side: what spoils the tower, its processor or the pipeline.


def with_changed(tower, name, change):
    """One tensor of what the processor gives is changed."""
    made = processor()

    def changed(**given):
        batch = made(**given)
        batch[name] = change(batch[name])
        return batch

    return against.transformers_pipeline(tower, changed)


def reordered(pixels):
    """Patches (B, N, 16 * 16 * 3) from the order (y, x, channel) into (channel, y, x)."""
    return pixels.view(-1, LENGTH, 16, 16, 3).permute(0, 1, 4, 2, 3).flatten(2)


def bicubic_pixels(tower):
    return against.transformers_pipeline(tower, processor(resample=3))


def transposed_table(tower):
    table = tower.embeddings.position_embedding.weight
    table.data = table.data.view(8, 8, 64).transpose(0, 1).reshape(64, 64)
    return against.transformers_pipeline(tower, processor())


def swapped_coordinates(tower):
    """Already in what the processor gives."""
    return with_changed(tower, "spatial_shapes", lambda shapes: shapes[:, [1, 0]])


def channels_first(tower):
    return with_changed(tower, "pixel_values", reordered)


def no_mask(tower):
    return with_changed(tower, "pixel_attention_mask", torch.ones_like)


def one_block_changed(tower):
    with torch.no_grad():
        tower.encoder.layers[1].mlp.fc1.weight[3, 5] += 0.01
    return against.transformers_pipeline(tower, processor())


def product_under_autocast(tower):
    resize = tower.embeddings.resize_positional_embeddings

    def in_bfloat16(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            return resize(*args, **kwargs)

    tower.embeddings.resize_positional_embeddings = in_bfloat16
    return against.transformers_pipeline(tower, processor())


def no_mask_in_the_pooling_head(tower):
    head = tower.head.forward
    tower.head.forward = lambda tokens, mask: head(tokens, None)
    return against.transformers_pipeline(tower, processor())


# Fault: the stage, how many of the pictures are beyond rounding there, and the reason's beginning.
FAULTS = {
    bicubic_pixels: ("pixels", 4, "resize filter: timm resizes pictures by bilinear"),
    transposed_table: ("position_embedding", 4, None),
    swapped_coordinates: ("grid", 3, None),
    channels_first: ("pixels", 4, "patch order"),
    no_mask: ("block_0", 3, "mask"),
    one_block_changed: ("block_1", 4, None),
    product_under_autocast: ("position_embedding", 4, None),
    no_mask_in_the_pooling_head: ("pooled", 3, "mask"),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_named_at_its_stage(fault, tower, model, pictures):
    stage, count, reason = FAULTS[fault]
    theirs = fault(tower)
    ours = against.timm_pipeline(model, LENGTH, "bilinear")
    comparison = Comparison(ours)
    comparison.add(refer(theirs, pictures))
    assert comparison.first() == stage
    pictures_beyond = {line["stage"]: line["pictures"] for line in comparison.stages()}
    assert pictures_beyond[stage] == count
    trials = against.known_reasons(model, ours, theirs, processor(resample=3), "bilinear")
    trial = comparison.explain(trials)
    if reason is None:
        assert trial is None
    else:
        assert trial.reason.startswith(reason)


def test_a_classifier_of_its_own_does_not_matter(model, pictures):
    model.reset_classifier(3)
    found = against.against_transformers(
        model, [pictures], contenders=[], max_seq_len=LENGTH, interpolation="bilinear"
    )
    assert found["first"] is None
    assert found["stages"][-1]["stage"] == "pooled"


@ran("matmul", "interpolate_cached")
def test_right_pipelines_part_nowhere_with_exact_modes(tower, model, pictures):
    found = against.against_transformers(
        model,
        [pictures[:3], pictures[3:]],
        contenders=["interpolate_cached", "matmul"],
        max_seq_len=LENGTH,
        interpolation="bilinear",
    )
    names = "grid pixels patch_embedding position_embedding block_0 block_1 pooled".split()
    assert found["reason"] is None
    for one in [found, *found["modes"].values()]:
        assert one["first"] is None
        assert [line["stage"] for line in one["stages"]] == names
        assert [line["pictures"] for line in one["stages"]] == [0] * 7
        assert one["stages"][0]["largest"] == 0
    assert (EMBEDDINGS, LATER) == (2e-6, 2e-5)
    assert found["pictures"] == 4
    assert "part nowhere on 4 pictures" in found["verdict"]


@ran("grid_sample")
def test_a_mode_that_does_not_antialias_is_named(model, pictures):
    found = against.against_transformers(
        model, [pictures], contenders=["grid_sample"], max_seq_len=LENGTH, same_patches=True
    )
    assert found["first"] is None
    assert found["modes"]["grid_sample"]["first"] == "position_embedding"
    assert "With grid_sample they part at position_embedding" in found["verdict"]


@pytest.mark.parametrize(
    ("setting", "value", "trained", "told"),
    [
        ("pos_embed_interp_mode", "bicubic", "bilinear", "pos_embed_interp_mode=bicubic, "),
        ("pos_embed_antialias", False, True, "pos_embed_antialias=False, "),
    ],
)
def test_the_setting_of_timms_table_that_differs_is_named(
    setting, value, trained, told, model, pictures
):
    setattr(model.embeds, setting, value)
    found = against.against_transformers(
        model, [pictures], contenders=[], max_seq_len=LENGTH, interpolation="bilinear"
    )
    assert found["first"] == "position_embedding"
    assert f"table filter: timm resamples the table with {told}" in found["reason"]
    assert found["mend"] == f"--model-kwargs {setting}={trained}"
    assert getattr(model.embeds, setting) == value


def test_transformers_own_code_is_measured_whatever_is_enabled(model, tower, pictures):
    pipeline = against.transformers_pipeline(tower, processor())
    expected = refer(pipeline, pictures).outputs["position_embedding"]
    with enable(library="transformers"):
        found = refer(pipeline, pictures).outputs["position_embedding"]
    assert torch.equal(found, expected)


def test_what_cannot_be_compared_is_said(pictures):
    other = timm.create_model("naflexvit_base_patch16_gap", embed_dim=24, depth=1, num_heads=2)
    with pytest.raises(
        ValueError, match=r"2 tensors of Siglip2's tower are not in it \['norm.bias', 'norm.w"
    ):
        against.against_transformers(other, [pictures])


def test_settings_beside_the_weights_are_followed(model, tmp_path):
    tower = against.build_tower(model, {"hidden_act": "relu", "dtype": "bfloat16"})
    assert tower.config.hidden_act == "relu"
    assert tower.dtype == torch.float32
    assert tower.config.num_attention_heads == 4
    assert against.build_processor(model, LENGTH, tmp_path).resample == 2
    processor(resample=0, max_num_patches=9).save_pretrained(tmp_path)
    made = against.build_processor(model, LENGTH, tmp_path)
    assert (made.resample, made.max_num_patches) == (0, LENGTH)


def test_settings_of_another_tower_are_told_in_a_line(model):
    with pytest.raises(RuntimeError, match=r"config\.json must be that of the weights") as error:
        against.build_tower(model, {"num_patches": 256})
    assert "\n" not in str(error.value)


# Any functions are a pipeline.


def pipeline_of(grids, pixels, pooled):
    """Whatever the pictures are, a pipeline that makes this of them."""
    inputs = Inputs(torch.tensor(grids), pixels, torch.ones(pixels.shape[:2], dtype=torch.bool))
    return Pipeline(lambda pictures: inputs, lambda inputs: {"pooled": pooled})


@pytest.mark.parametrize("shift", [3.0, float("nan")])
def test_padding_and_pictures_of_another_grid_are_not_compared(shift):
    pixels = torch.zeros(2, 4, 3)
    ours_pixels = torch.ones(2, 4, 3)
    ours_pixels[0, :2] = torch.tensor([[0.5], [0]])  # its two patches
    pooled = torch.zeros(2, 5)
    theirs = pipeline_of([[1, 2], [2, 2]], pixels, pooled)
    comparison = Comparison(pipeline_of([[1, 2], [1, 4]], ours_pixels, pooled + shift))
    for pictures in (["a", "b"], ["c", "d"]):
        comparison.add(refer(theirs, pictures))
    grid, pixels, pooled = comparison.stages()
    assert comparison.first() == "grid"
    assert (grid["pictures"], pixels["pictures"], pooled["pictures"]) == (2, 2, 4)
    assert [pixels["largest"], pixels["rms"]] == pytest.approx([0.5, 0.125**0.5])
    assert [pooled["largest"], pooled["rms"]] == pytest.approx([shift, shift], nan_ok=True)
