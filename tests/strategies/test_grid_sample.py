"""grid_sample gives the result of timm's own flag, without a grid_sample over the tokens."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from timm.models import naflexvit

from tests.support.checks import by_timms_method
from tests.support.oracles import NEW_TIMM, Case, row_major, stock
from timm_naflex_fast import enable, status
from timm_naflex_fast.functional import add_pos_embed_

ours = partial(by_timms_method, strategy="grid_sample")
# Older timm gathers from a dense grid, and takes whole numbers alone.
AT_COORDINATES = hasattr(naflexvit, "_normalize_naflex_grid_sample_coords")
SIZES = [(3, 40), (17, 19), (41, 7), (64, 48), (90, 11)]
TABLES = [((64, 48), "bicubic"), ((16, 16), "bilinear"), ((60, 60), "bilinear")]


def sampled_exactly(case, table, coord):
    """The embeddings (B, N, C), float64, by ``F.grid_sample`` at each token's coordinate."""
    size = (coord.amax(1, keepdim=True) + 1).double()
    cell = coord.double()
    if case.align_corners:
        where = 2 * cell / (size - 1) - 1
    else:
        where = (2 * cell + 1) / size - 1
    images = table.double().permute(0, 3, 1, 2).expand(len(coord), -1, -1, -1)
    how = dict(mode=case.mode, align_corners=case.align_corners)
    sampled = F.grid_sample(images, where.flip(-1)[:, :, None], padding_mode="border", **how)
    return sampled[..., 0].transpose(1, 2)


@pytest.mark.parametrize("table_size, mode", TABLES)
@pytest.mark.parametrize("align_corners", [False, True])
def test_as_close_to_float64_as_timms_flag(table_size, mode, align_corners):
    if align_corners and not NEW_TIMM:
        pytest.skip("older timm has no align_corners")
    how = dict(mode=mode, align_corners=align_corners, use_grid_sample=True)
    case = Case(sizes=SIZES, table_size=table_size, channels=64, length=3072, seed=3, **how)
    embeds = case.embeds().requires_grad_(False)
    coord = case.coord()

    theirs, mine = torch.zeros(2, 5, 3072, 64)
    stock(case, embeds, theirs, coord)
    ours(case, embeds, mine, coord)

    exact = sampled_exactly(case, embeds.pos_embed, coord)
    assert (mine - exact).abs().max() <= 1.5 * (theirs - exact).abs().max()


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


def test_coordinates_that_name_no_cell_are_an_error_in_a_compiled_graph():
    coord = row_major([(3, 4)], 15)
    coord[0, 12] = -1
    add = torch.compile(add_pos_embed_, backend="eager", fullgraph=True)
    with pytest.raises(ValueError, match="patch_coord must be whole numbers from 0"):
        add(torch.zeros(1, 15, 4), torch.randn(6, 5, 4), coord, strategy="grid_sample")
