"""What the drift report measures: on tensors with known answers, and with modes inside a model."""

import math

import pytest
import torch

from tests.support.measured import GRIDS, batches, table_model
from tests.support.oracles import small_vit, vit_batch
from tests.support.running import ran
from timm_naflex_fast.commands.measure.drift.report import rows
from timm_naflex_fast.commands.measure.drift.survey import TIE, is_exact, same_nearest, survey
from timm_naflex_fast.names import MODES


@pytest.fixture(scope="module")
def measured():
    """A survey of eight images in four grids, with a table of 12 x 8 cells."""
    model = table_model(pos_embed_grid_size=(12, 8))
    with ran("matmul", "interpolate_cached", "grid_sample"):
        found = survey(model, list(batches(labels=True)))
    assert not torch.is_inference(model.embeds.pos_embed)
    return found


def test_what_is_exact_and_what_is_not(measured):
    figures = measured["drift"]
    assert list(figures) == list(MODES)
    exact = [name for name in figures if is_exact(measured, name)]
    assert exact == ["stock", "matmul", "interpolate_cached"]
    timms = figures["stock"]
    assert timms == figures["interpolate_cached"]
    assert timms["embed_max_abs"] == timms["pooled_cosine_distance"] == 0
    assert timms["agreement"] == timms["neighbours"] == figures["matmul"]["neighbours"] == 1


def test_each_grid_has_its_own_figures(measured):
    assert measured["images"] == 8
    found = {tuple(grid["grid"]): (grid["images"], grid["shrink"]) for grid in measured["grids"]}
    assert found == {(5, 2): (2, 4), (6, 6): (2, 2), (3, 4): (2, 4), (2, 9): (2, 6)}


@ran("matmul")
@pytest.mark.parametrize(("classes", "last"), [(5, "same class"), (0, "same nearest image")])
def test_without_labels_or_classes_there_are_no_columns_of_them(classes, last):
    model = small_vit()
    model.reset_classifier(classes)
    found = survey(model, batches(labels=not classes), ["matmul"])
    assert list(rows(found)[1])[-1] == last


@ran("grid_sample", "matmul")
def test_of_a_model_that_pools_nothing_the_mean_of_the_last_tokens_is_compared():
    batch = vit_batch(GRIDS)
    figures = []
    for pool in ("", "avg"):
        model = table_model(pos_embed_grid_size=(16, 16), global_pool=pool, fc_norm=False)
        found = survey(model, [(batch, None)], ["grid_sample", "matmul"])["drift"]
        figures.append([found[mode]["pooled_cosine_distance"] for mode in found])
    stock, moved, exact = figures[0]
    assert 0 == stock < exact < 1e-10 < moved
    assert figures[0] == pytest.approx(figures[1], rel=1e-3)


def on_a_circle(*angles):
    angles = torch.tensor(angles, dtype=torch.float64)
    return torch.stack([angles.cos(), angles.sin()], -1)


@pytest.mark.parametrize(("lost", "share"), [(0.5 * TIE, 1), (2 * TIE, 2 / 3)])
def test_a_neighbour_is_another_where_timm_finds_it_less_similar_than_its_best(lost, share):
    # Seen from the first image, the second is the nearest to timm, and the third to the other.
    farther = math.acos(math.cos(0.5) - lost)
    timms = on_a_circle(0, 0.5, -farther)
    ours = on_a_circle(0, 0.6, -0.5)
    assert same_nearest(timms, timms).all()
    assert same_nearest(ours, timms).double().mean() == pytest.approx(share)


@ran("matmul")
def test_of_two_images_none_has_a_choice():
    found = survey(table_model(), [(vit_batch(GRIDS[:2]), None)], ["matmul"])
    assert found["drift"]["stock"]["neighbours"] is None
