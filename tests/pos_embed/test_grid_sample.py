"""grid_sample gives the result of timm's own flag, at any coordinate."""

from functools import partial

import pytest
import torch
from timm.models import naflexvit
from torch.utils.flop_counter import FlopCounterMode

from tests.support.oracles import OLD_TORCH, STOCK, Case, relative, stock, tables
from tests.support.running import running
from timm_naflex_fast import enable, status

BY_FLAG = "_apply_learned_naflex_pos_embed_grid_sample"

# Older timm gathers from a dense grid, and takes whole numbers alone.
AT_COORDINATES = hasattr(naflexvit, "_normalize_naflex_grid_sample_coords")


def coordinates_that_name_no_cell(case, kind):
    if kind == "fractional":
        coord = case.coord(torch.float32)
        return coord + torch.rand(coord.shape)
    coord = case.coord()
    token, value = {"negative padding": (12, -1), "negative": (3, -1), "far": (3, 9000)}[kind]
    coord[1, token] = value
    return coord


def by_graph(method):
    """The method, compiled."""

    def add(x, patch_coord):
        total = x * 1
        method(total, patch_coord)
        return total

    graph = torch.compile(add, backend="eager", fullgraph=True)
    return lambda x, patch_coord: x.add_(graph(x, patch_coord))


@pytest.mark.skipif(not AT_COORDINATES, reason="this timm's flag takes whole numbers alone")
@pytest.mark.parametrize(
    "align_corners, ar_preserving", [(False, False), (True, False), (False, True)]
)
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("kind", ["fractional", "negative padding", "negative", "far"])
def test_any_coordinate_is_sampled_as_by_timms_flag(mode, kind, align_corners, ar_preserving):
    case = Case(
        sizes=[(3, 4), (5, 2), (5, 2)],
        mode=mode,
        length=15,
        align_corners=align_corners,
        ar_preserving=ar_preserving,
        use_grid_sample=True,
    )
    embeds = case.embeds()
    coord = coordinates_that_name_no_cell(case, kind)
    weight = case.x()

    def added(method):
        x = torch.zeros(3, 15, 4)
        method(x, patch_coord=coord)
        return x, *torch.autograd.grad((x * weight).sum(), tables(embeds))

    want = added(partial(STOCK[BY_FLAG], embeds))
    with running("grid_sample", model=embeds):
        found = {
            "by its flag": added(embeds._apply_learned_naflex_pos_embed_grid_sample),
            "without flag": added(embeds._apply_learned_naflex_pos_embed),
            "compiled": added(by_graph(embeds._apply_learned_naflex_pos_embed)),
        }
        with FlopCounterMode(display=False):
            found["in sight of a mode"] = added(embeds._apply_learned_naflex_pos_embed)
    for way, (tokens, gradient) in found.items():
        if OLD_TORCH and way == "compiled":  # its graphs hold no operator, but the formula
            assert relative(tokens, want[0]) <= 2e-6
        else:
            assert torch.equal(tokens, want[0]), way
        assert relative(gradient, want[1]) <= 1e-5


def test_long_grids_are_sampled_where_timm_samples():
    case = Case(sizes=[(974, 1)], table_size=(128, 128), mode="bilinear", use_grid_sample=True)
    embeds = case.embeds().requires_grad_(False)
    want = stock(case, embeds, torch.zeros_like(case.x()), case.coord())
    got = torch.zeros_like(want)

    with enable("grid_sample", model=embeds):
        embeds._apply_learned_naflex_pos_embed(got, patch_coord=case.coord())
        assert status().calls == {("pos_embed", "grid_sample"): 1}

    assert (got - want).abs().max() <= 3e-7 * want.abs().max()
