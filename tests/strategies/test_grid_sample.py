"""grid_sample gives the result of timm's own flag, without a grid_sample over the tokens."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from timm.models import naflexvit

from tests.support.checks import by_timms_method
from tests.support.oracles import NEW_TIMM, Case, relative, stock
from tests.support.running import running
from timm_naflex_fast import status
from timm_naflex_fast.functional import add_pos_embed_

ours = partial(by_timms_method, strategy="grid_sample")


@pytest.mark.parametrize(
    "table,mode", [((64, 48), "bicubic"), ((16, 16), "bilinear"), ((60, 60), "bilinear")]
)
@pytest.mark.parametrize("align_corners", [False, True])
def test_as_close_to_float64_as_timms_flag(table, mode, align_corners):
    if align_corners and not NEW_TIMM:
        pytest.skip("older timm has no align_corners")
    sizes, how = (
        [(3, 40), (17, 19), (41, 7), (64, 48), (90, 11)],
        dict(mode=mode, align_corners=align_corners),
    )
    case = Case(
        sizes=sizes, table_size=table, channels=64, length=3072, seed=3, use_grid_sample=True, **how
    )
    embeds, coord = case.embeds().requires_grad_(False), case.coord()
    theirs, mine = torch.zeros(2, 5, 3072, 64)
    stock(case, embeds, theirs, coord)
    ours(case, embeds, mine, coord)
    size, cell = (coord.amax(1, keepdim=True) + 1).double(), coord.double()
    where = 2 * cell / (size - 1) - 1 if align_corners else (2 * cell + 1) / size - 1
    images = embeds.pos_embed.double().permute(0, 3, 1, 2).expand(5, -1, -1, -1)
    exact = F.grid_sample(images, where.flip(-1)[:, :, None], padding_mode="border", **how)[
        ..., 0
    ].transpose(1, 2)
    assert (mine - exact).abs().max() <= 1.5 * (theirs - exact).abs().max()


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("kind", ["fractional", "negative padding", "negative"])
def test_coordinates_that_name_no_cell_are_sampled_by_timm_itself(mode, kind):
    at_coordinates = hasattr(
        naflexvit, "_normalize_naflex_grid_sample_coords"
    )  # older timm gathers from a dense grid
    if kind == "fractional" and not at_coordinates:
        pytest.skip("this timm's grid_sample flag takes whole numbers alone")
    case = Case(sizes=[(3, 4), (5, 2), (5, 2)], mode=mode, length=15, use_grid_sample=True)
    embeds, coord = (
        case.embeds(),
        case.coord(torch.float32 if kind == "fractional" else torch.int64),
    )
    if kind == "fractional":
        coord += torch.rand(coord.shape)
    else:
        coord[1, 12 if kind == "negative padding" else 3] = -1
    embeds.requires_grad_(False)
    want, got, x, without_flag = torch.zeros(4, 3, 15, 4)
    stock(case, embeds, want, coord)
    with running("grid_sample", model=embeds):
        embeds._apply_learned_naflex_pos_embed_grid_sample(got, patch_coord=coord)
        assert torch.equal(got, want) and status().fallbacks == {"coordinates that name no cell": 1}
        assert status().calls == {("pos_embed", "stock"): 1, ("pos_embed", "grid_sample"): 0}
        embeds._apply_learned_naflex_pos_embed(without_flag, patch_coord=coord)
        assert torch.equal(without_flag, want)
    if kind == "negative padding" and at_coordinates:  # a graph cannot ask
        embeds.requires_grad_()
        add = lambda x: add_pos_embed_(
            x * 1, embeds.pos_embed, coord, mode=mode, strategy="grid_sample"
        )
        compiled, theirs = torch.compile(add, backend="eager", fullgraph=True)(x), x.clone()
        torch.testing.assert_close(compiled, want, atol=1e-5, rtol=0)
        stock(case, embeds, theirs, coord)
        grads = [
            torch.autograd.grad(out.square().sum(), embeds.pos_embed)[0]
            for out in (compiled, theirs)
        ]
        assert relative(*grads) <= 1e-5
