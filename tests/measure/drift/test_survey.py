"""What the drift report measures: on tensors with known answers, with contenders inside a model."""

import pytest
import torch
from timm.data.naflex_transforms import patchify_image

from tests.support.measured import GRIDS, batches, table_model
from tests.support.oracles import embed, small_vit, vit_batch
from tests.support.running import ran
from timm_naflex_fast.measure.contenders import CONTENDERS, use
from timm_naflex_fast.measure.drift.pictures import on_grid, pixels_of
from timm_naflex_fast.measure.drift.report import cells
from timm_naflex_fast.measure.drift.survey import survey


@ran("matmul")
def test_timms_setting_for_a_learned_table_is_left_out_of_factorized_ones():
    found = survey(small_vit(pos_embed="factorized"), batches(), CONTENDERS)
    assert list(found.drift) == ["stock", "interpolate_cached", "grid_sample", "matmul"]


@pytest.fixture(scope="module")
def measured():
    """A survey of eight images in four grids, with a table of 12 x 8 cells."""
    model = table_model(pos_embed_grid_size=(12, 8))
    with ran("matmul", "interpolate_cached", "grid_sample"):
        found = survey(model, list(batches(labels=True)), CONTENDERS, pictures=True)
    assert not torch.is_inference(model.embeds.pos_embed)
    return found


def test_what_is_exact_and_what_is_not(measured):
    exact = [name for name in measured.drift if measured.exact(name)]
    assert exact == ["stock", "interpolate_cached", "matmul"]
    timms = measured.drift["stock"]
    assert timms == measured.drift["interpolate_cached"]
    assert timms.embed_max_abs == timms.pooled_cosine_distance == 0
    assert timms.agreement == 1


def test_each_grid_has_its_own_figures(measured):
    assert measured.images == 8
    found = {grid.grid: (grid.images, grid.shrink) for grid in measured.grids}
    assert found == {(5, 2): (2, 4), (6, 6): (2, 2), (3, 4): (2, 4), (2, 9): (2, 6)}


@ran("matmul")
@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_the_tables_own_grid_is_not_resampled(kind):
    found = survey(small_vit(pos_embed=kind, pos_embed_grid_size=(3, 4)), batches(), ["matmul"])
    assert [grid.grid for grid in found.grids if not grid.resampled] == [(3, 4)]


def test_pictures_are_the_worst_and_the_median(measured):
    reasons = {shown.name.split(": ")[1] for shown in measured.pictures}
    assert reasons == {"the worst of 8 images", "the median"}
    for shown in measured.pictures:
        h, w = shown.map.shape
        assert shown.contender == "grid_sample" and (h, w) in GRIDS
        assert shown.pixels.shape == (h * 4, w * 4, 3)


@ran("matmul")
@pytest.mark.parametrize(("classes", "last"), [(5, "same class"), (0, "same nearest image")])
def test_without_labels_or_classes_there_are_no_columns_of_them(classes, last):
    model = small_vit()
    model.reset_classifier(classes)
    drift = survey(model, batches(labels=not classes), ["matmul"]).drift["matmul"]
    assert list(cells("matmul", drift))[-1] == last


@ran("grid_sample")
def test_of_two_images_the_nearest_other_one_says_nothing():
    two = {key: value[:2] for key, value in vit_batch(GRIDS).items()}
    three = {key: value[:3] for key, value in vit_batch(GRIDS).items()}
    model = table_model(pos_embed_grid_size=(16, 16))
    assert survey(model, [(two, None)], ["grid_sample"]).drift["grid_sample"].neighbours is None
    assert survey(model, [(three, None)], ["grid_sample"]).drift["stock"].neighbours == 1


@ran("grid_sample", "matmul")
def test_of_a_model_that_pools_nothing_the_last_tokens_are_compared():
    model = table_model(pos_embed_grid_size=(16, 16), global_pool="")
    batch = vit_batch(GRIDS)
    inputs = (batch["patches"], batch["patch_coord"], batch["patch_valid"])
    found = survey(model, [(batch, None)], ["grid_sample", "matmul"]).drift
    moved = found["grid_sample"]
    assert moved.pooled_cosine_distance is moved.neighbours is moved.agreement is None
    assert found["stock"].tokens_cosine_distance == 0
    assert 0 < found["matmul"].tokens_cosine_distance < 1e-10

    # By hand: the mean over an image's own tokens, and then over images.
    with torch.no_grad(), use("stock", model):
        timms = model.forward_features(*inputs)["patches"].double()
    with torch.no_grad(), use("grid_sample", model):
        ours = model.forward_features(*inputs)["patches"].double()
    cosine = torch.nn.functional.cosine_similarity(ours, timms, dim=-1)[
        :, -batch["patches"].shape[1] :
    ]
    images = [1 - one[valid].mean() for one, valid in zip(cosine, batch["patch_valid"])]
    assert moved.tokens_cosine_distance == pytest.approx(torch.stack(images).mean().item())


@ran("matmul")
def test_rounding_alone_makes_no_picture_of_noise(monkeypatch):
    def only_stock(found, name):
        return name == "stock"

    monkeypatch.setattr("timm_naflex_fast.measure.drift.survey.Survey.exact", only_stock)
    found = survey(table_model(pos_embed_grid_size=(12, 8)), list(batches()), ["matmul"], True)
    assert found.pictures and found.drift["matmul"].embed_max_abs > 0
    assert all((shown.map == 0).all() for shown in found.pictures)


@ran("grid_sample", "matmul")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_tie_and_real_changes_count(dtype):
    # Sixteen pictures, each three times, in batches of other sizes, which round otherwise.
    model = table_model(pos_embed_grid_size=(16, 16)).to(dtype)
    pictures = vit_batch(GRIDS * 4)
    fewer = {key: value[:7] for key, value in pictures.items()}
    others = {key: value[7:] for key, value in pictures.items()}
    copies = [(some, None) for some in (pictures, fewer, others, pictures)]
    ours = survey(model, copies, ["matmul"]).drift["matmul"]
    assert ours.neighbours == ours.agreement == 1

    # The same pictures once: their nearest ones are other pictures.
    drift = survey(model, [(pictures, torch.arange(16) % 5)], ["grid_sample"]).drift
    moved = drift["grid_sample"]
    assert moved.neighbours < 0.9 and moved.agreement < 1
    assert moved.accuracy != drift["stock"].accuracy


def test_an_image_is_made_of_its_patches_again():
    image = torch.linspace(0, 1, 8 * 12).view(1, 8, 12)
    patches, _, _ = patchify_image(image, (4, 4))  # (6, 16)
    made = pixels_of(on_grid(patches[None], [2, 3]), table_model().embeds)
    assert torch.equal(made[..., 0], image[0])


def test_inside_a_model_computes_as_timm_with_this_setting_and_afterwards_as_before():
    batch = vit_batch(GRIDS)
    model = table_model()
    before = dict(model.embeds.__dict__)
    timms = small_vit(pos_embed_use_grid_sample=True, pos_embed_interp_mode="bicubic").eval()
    timms.load_state_dict(model.state_dict())
    with use("timm-flag-bicubic", model):
        assert torch.equal(embed(model, batch), embed(timms, batch))
    assert model.embeds.__dict__ == before
