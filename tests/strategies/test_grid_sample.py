"""grid_sample gives the result of timm's own flag, without a grid_sample over the tokens."""

import pytest
import torch
from timm.models import naflexvit

from tests.support.oracles import OLD_TORCH, Case, row_major, stock
from timm_naflex_fast import enable, status
from timm_naflex_fast.functional import add_pos_embed_

# Older timm gathers from a dense grid, and takes whole numbers alone.
AT_COORDINATES = hasattr(naflexvit, "_normalize_naflex_grid_sample_coords")


def coordinates_that_name_no_cell(case, kind):
    if kind == "fractional":
        coord = case.coord(torch.float32)
        return coord + torch.rand(coord.shape)
    coord = case.coord()
    coord[1, 12 if kind == "negative padding" else 3] = -1
    return coord


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("kind", ["fractional", "negative padding", "negative"])
def test_coordinates_that_name_no_cell_are_sampled_by_timm_itself(mode, kind):
    if kind == "fractional" and not AT_COORDINATES:
        pytest.skip("this timm's grid_sample flag takes whole numbers alone")
    case = Case(sizes=[(3, 4), (5, 2), (5, 2)], mode=mode, length=15, use_grid_sample=True)
    embeds = case.embeds().requires_grad_(False)
    coord = coordinates_that_name_no_cell(case, kind)
    want, by_its_flag, without_flag = torch.zeros(3, 3, 15, 4)
    stock(case, embeds, want, coord)

    with enable("grid_sample", model=embeds):
        embeds._apply_learned_naflex_pos_embed_grid_sample(by_its_flag, patch_coord=coord)
        embeds._apply_learned_naflex_pos_embed(without_flag, patch_coord=coord)
        assert status().fallbacks == {"coordinates that name no cell": 2}
        assert status().calls == {("pos_embed", "stock"): 2}

    assert torch.equal(by_its_flag, want)
    assert torch.equal(without_flag, want)


def test_long_grids_are_sampled_where_timm_samples():
    case = Case(sizes=[(974, 1)], table_size=(128, 128), mode="bilinear", use_grid_sample=True)
    embeds = case.embeds().requires_grad_(False)
    want = stock(case, embeds, torch.zeros_like(case.x()), case.coord())
    got = torch.zeros_like(want)

    with enable("grid_sample", model=embeds):
        embeds._apply_learned_naflex_pos_embed(got, patch_coord=case.coord())
        assert status().calls == {("pos_embed", "grid_sample"): 1}

    assert (got - want).abs().max() <= 3e-7 * want.abs().max()


@pytest.mark.skipif(OLD_TORCH, reason="its graphs hold no operator: they sample everywhere")
def test_coordinates_that_name_no_cell_are_an_error_in_a_compiled_graph():
    coord = row_major([(3, 4)], 15)
    coord[0, 12] = -1
    add = torch.compile(add_pos_embed_, backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match=r"sample 0 holds a negative .* with grid_sample"):
        add(torch.zeros(1, 15, 4), torch.randn(6, 5, 4), coord, strategy="grid_sample")
