"""What the drift report measures: on tensors with known answers, with contenders inside a model."""

import pytest
import torch

from tests.support.measured import WITHOUT_HF, batches, table_model
from tests.support.oracles import small_vit
from tests.support.running import ran
from timm_naflex_fast.measure.contenders import NAMES, missing
from timm_naflex_fast.measure.drift.survey import survey
from timm_naflex_fast.patching.settings import MODES

# metrics


# contenders


@ran("matmul")
def test_what_cannot_be_measured_is_left_out_with_the_reason():
    model = table_model()
    assert missing("timm-flag-bilinear", model.embeds) is None and missing("matmul", model.embeds) is None
    flagged = table_model(pos_embed_use_grid_sample=True)
    assert "own setting" in missing("timm-flag-bilinear", flagged.embeds)
    factorized = small_vit(pos_embed="factorized")
    assert "factorized" in missing("issue-2514-zeros", factorized.embeds)
    found = survey(factorized, batches(), NAMES)
    assert list(found.drift) == ["stock", "interpolate_cached", "grid_sample", "matmul"]
    assert set(found.left_out) == {name for name in NAMES if name not in MODES}


# the survey


@ran("matmul", "interpolate_cached", "grid_sample")
def test_survey_of_a_tiny_model():
    model = table_model(pos_embed_grid_size=(12, 8))
    found = survey(model, list(batches(labels=True)), WITHOUT_HF, pictures=True)
    assert found.images == 8 and not torch.is_inference(model.embeds.pos_embed)
    assert all(found.exact(name) for name in ("stock", "interpolate_cached", "matmul"))
    assert not found.exact("grid_sample") and found.drift["stock"].embed_max_abs == 0
    # The same thing by another way, in a model that takes it through all its blocks.
    ours, timms = found.drift["grid_sample"], found.drift["timm-flag-bilinear"]
    assert ours.embed_rel_rms == pytest.approx(timms.embed_rel_rms, rel=1e-4)
    assert abs(found.drift["issue-2514-zeros"].embed_rel_rms - ours.embed_rel_rms) > 1e-3, (
        "padding counts at the border"
    )
    assert [grid.grid for grid in found.grids] == [(5, 2), (6, 6), (3, 4), (2, 9)]
    assert [grid.shrink for grid in found.grids] == [4, 2, 4, 6]
    assert sum(grid.images for grid in found.grids) == 8
    worst, median, shrunk = found.pictures
    assert "the worst of 8 images" in worst.name and "the median" in median.name
    assert "the table shrinks most (6.0 cells per patch)" in shrunk.name and shrunk.maps["grid_sample"].shape == (2, 9)
    assert shrunk.pixels.shape[:2] == (2 * 4, 9 * 4) and list(worst.maps) == ["grid_sample"]


@ran("matmul")
def test_another_dtype():
    model = table_model().to(torch.bfloat16)
    exact = survey(model, batches(), ["matmul"])
    assert exact.exact("matmul") and exact.drift["matmul"].embed_rel_rms < 1e-3
    assert next(model.parameters()).dtype == torch.bfloat16
