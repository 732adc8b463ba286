"""What the drift report measures: on tensors with known answers, with contenders inside a model."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.measured import GRIDS, batches, table_model
from tests.support.oracles import embed, small_vit, vit_batch
from tests.support.running import ran
from timm_naflex_fast.measure.contenders import CONTENDERS, use
from timm_naflex_fast.measure.drift.pictures import choose
from timm_naflex_fast.measure.drift.report import columns, row_text
from timm_naflex_fast.measure.drift.survey import survey
from timm_naflex_fast.names import STRATEGY_NAMES
from timm_naflex_fast.patching.choices import MODES


@ran("matmul")
def test_what_cannot_be_measured_is_left_out_with_the_reason():
    found = survey(small_vit(pos_embed="factorized"), batches(), CONTENDERS)
    assert list(found.drift) == ["stock", "interpolate_cached", "grid_sample", "matmul"]
    assert set(found.left_out) == {name for name in CONTENDERS if name not in MODES}
    assert "factorized" in found.left_out["timm-flag-bicubic"]


@ran("matmul", "interpolate_cached", "grid_sample")
def test_survey_of_a_tiny_model():
    model = table_model(pos_embed_grid_size=(12, 8))
    found = survey(model, list(batches(labels=True)), CONTENDERS, pictures=True)
    assert found.images == 8 and not torch.is_inference(model.embeds.pos_embed)
    assert [name for name in found.drift if found.exact(name)] == [
        "stock",
        "interpolate_cached",
        "matmul",
    ]
    timms, cached = found.drift["stock"], found.drift["interpolate_cached"]
    assert (
        timms == cached
        and timms.embed_max_abs == timms.pooled_cosine_distance == 0
        and timms.agreement == 1
    )
    # The same thing by another way, in a model that takes it through all its blocks.
    ours, flag = (found.drift[name].embed_rel_rms for name in ("grid_sample", "timm-flag-bilinear"))
    assert ours == pytest.approx(flag, rel=1e-4)
    shrinks = {(5, 2): 4, (6, 6): 2, (3, 4): 4, (2, 9): 6}
    assert {grid["grid"]: grid["shrink"] for grid in found.grids} == shrinks
    assert sum(grid["images"] for grid in found.grids) == 8
    worst, median, shrunk = found.pictures
    assert "the worst of 8 images" in worst.name and "the median" in median.name
    assert "the table shrinks most (6.0 cells per patch)" in shrunk.name and shrunk.maps[
        "grid_sample"
    ].shape == (2, 9)
    assert shrunk.pixels.shape[:2] == (2 * 4, 9 * 4) and list(worst.maps) == ["grid_sample"]


def test_an_image_that_hardly_differs_is_not_shown():
    found = choose([0.0, 1e-9, 0.0, 0.3, 0.1], [2.0, 4.0, 1.0, 1.0, 1.0])
    assert found == {3: "the worst of 5 images", 4: "the median"}
    assert choose([0.0, 0.1, 0.2], [4.0, 1.0, 1.0]) == {2: "the worst of 3 images", 1: "the median"}
    assert [*choose([0.1, 0.2, 0.3], [2.0, 1.0, 1.0])] == [2, 1, 0]


@ran("matmul")
def test_without_labels_and_without_a_classifier():
    model = small_vit()
    found = survey(model, batches(), ["matmul"])
    assert found.drift["matmul"].accuracy is None and found.drift["matmul"].agreement == 1
    assert list(columns(found.drift["stock"]))[-1] == "agreement"
    model.reset_classifier(0)
    found = survey(model, batches(labels=True), ["matmul"])
    headings = columns(found.drift["stock"])
    assert list(headings) == [
        "embed_max_abs",
        "embed_rel_rms",
        "pooled_cosine_distance",
        "neighbours",
    ]
    assert len(row_text(found.drift["matmul"], headings)) == 4
    with pytest.raises(ValueError, match="no image"):
        survey(model, [])


def padded(batch, length):
    """The batch with more padding tokens."""
    more = length - batch["patches"].shape[1]
    return {
        "patches": F.pad(batch["patches"], (0, 0, 0, more)),
        "patch_coord": F.pad(batch["patch_coord"], (0, 0, 0, more)),
        "patch_valid": F.pad(batch["patch_valid"], (0, more)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_tie_and_real_changes_count(dtype):
    # Sixteen pictures, each three times, in batches of other lengths.
    model = table_model(pos_embed_grid_size=(16, 16)).to(dtype)
    pictures = vit_batch(GRIDS * 4)
    copies = [(padded(pictures, length), None) for length in (36, 50, 90)]
    with ran("interpolate_cached", "matmul"):
        found = survey(model, copies, ["interpolate_cached", "matmul"])
    for drift in found.drift.values():
        assert drift.neighbours == drift.agreement == 1

    # The same pictures once: their nearest ones are other pictures.
    labels = torch.arange(16) % 5
    with ran("grid_sample", "matmul"):
        found = survey(model, [(pictures, labels)], ["grid_sample", "matmul"])
    moved = found.drift["grid_sample"]
    assert found.drift["matmul"].neighbours == found.drift["matmul"].agreement == 1
    assert moved.neighbours < 0.9 and moved.agreement < 1
    assert moved.accuracy != found.drift["stock"].accuracy


@ran("grid_sample")
def test_a_kept_image_follows_the_coordinates_and_not_the_order_of_the_tokens():
    batch = vit_batch([(2, 3)])
    turned = {
        **batch,
        "patches": batch["patches"].flip(1),
        "patch_coord": batch["patch_coord"].flip(1),
    }
    a, b = (
        survey(table_model(), [(one, None)], ["grid_sample"], pictures=True)
        for one in (batch, turned)
    )
    assert torch.equal(a.pictures[0].pixels, b.pictures[0].pixels)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("name", [name for name in CONTENDERS if name not in MODES])
def test_a_contender_inside_a_model_is_what_timm_makes_with_this_setting(name, mode):
    model, batch = small_vit(pos_embed_interp_mode=mode).eval(), vit_batch(GRIDS)
    timms = small_vit(
        pos_embed_use_grid_sample=True, pos_embed_interp_mode=name.removeprefix("timm-flag-")
    ).eval()
    timms.load_state_dict(model.state_dict())
    with use(name, model):
        assert torch.equal(embed(model, batch), embed(timms, batch))


@pytest.mark.parametrize("name", CONTENDERS)
def test_everything_is_put_back_after_an_error(name):
    model = table_model()
    before, stock = dict(model.embeds.__dict__), embed(model)
    with (
        ran(*{name} & {*STRATEGY_NAMES}),
        pytest.raises(RuntimeError, match="half way"),
        use(name, model),
    ):
        assert torch.allclose(embed(model), stock, atol=2e-6) == (
            name in ("stock", "interpolate_cached", "matmul")
        )
        raise RuntimeError("half way")
    assert model.embeds.__dict__ == before and torch.equal(embed(model), stock)
