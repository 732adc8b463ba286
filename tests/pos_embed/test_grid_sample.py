"""grid_sample gives the result of timm's own flag, at any coordinate."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from timm.models import naflexvit
from torch.utils.flop_counter import FlopCounterMode

from tests.support.oracles import STOCK, Case, relative, stock, tables
from tests.support.running import running
from timm_naflex_fast import enable, status
from timm_naflex_fast.pos_embed import graphs

BY_FLAG = "_apply_learned_naflex_pos_embed_grid_sample"

# Older timm gathers from a dense grid, and takes whole numbers alone.
AT_COORDINATES = hasattr(naflexvit, "_normalize_naflex_grid_sample_coords")


SIZES = [(3, 4), (9, 2), (1, 1), (20, 14)]
IS_PADDING = torch.arange(280) >= torch.tensor([[12], [18], [1], [280]])
options = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["bilinear", "bicubic"]),
        "align_corners": st.booleans(),
        "ar_preserving": st.booleans(),
    }
)
shifts = st.sampled_from([None, (0.0, 0.5), (-0.3, -0.3), (0.5, 0.5)])


@pytest.mark.skipif(not AT_COORDINATES, reason="this timm's flag takes whole numbers alone")
@pytest.mark.parametrize("table_size", [(6, 5), (33, 40), (128, 128), (1, 7)], ids=str)
@given(options, shifts, st.booleans(), st.sampled_from([None, -1, 9000]))
def test_any_coordinate_is_sampled_as_by_timms_flag(table_size, how, shift, is_padding_told, wrong):
    case = Case(sizes=SIZES, table_size=table_size, channels=16, use_grid_sample=True, **how)
    embeds = case.embeds()
    coord = case.coord()
    if shift:
        coord = coord + torch.empty(coord.shape).uniform_(*shift)
    if is_padding_told:
        coord[IS_PADDING] = -1
    if wrong:
        coord[1, 3] = wrong
    weight = case.x()

    def added(method):
        x = torch.zeros(weight.shape)
        method(x, patch_coord=coord)
        return x, *torch.autograd.grad((x * weight).sum(), tables(embeds))

    def by_plain_operations(x, patch_coord):
        graphs.add_plain(x, embeds.pos_embed[0], patch_coord, case.spec(samples=True))

    want = added(partial(STOCK[BY_FLAG], embeds))
    with running("grid_sample", model=embeds):
        found = [
            added(embeds._apply_learned_naflex_pos_embed_grid_sample),
            added(embeds._apply_learned_naflex_pos_embed),
        ]
        with FlopCounterMode(display=False):  # by the operator of compiled graphs
            found.append(added(embeds._apply_learned_naflex_pos_embed))
    if shift or is_padding_told or wrong:  # else the table is resized, not sampled
        for tokens, _ in found:
            assert torch.equal(tokens, want[0])
    for tokens, gradient in (*found, added(by_plain_operations)):
        assert (tokens - want[0]).abs().max() <= 2e-6 * max(1, embeds.pos_embed.abs().max())
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
