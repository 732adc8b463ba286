"""The plain operations and the operator; see contract/ for their result."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.oracles import NEW_TIMM, Case, stock, tables
from timm_naflex_fast import __version__
from timm_naflex_fast.patching.timm_methods import read_embeds
from timm_naflex_fast.pos_embed import graphs
from timm_naflex_fast.pos_embed.table import ResizeSpec, whole

SIZES = [(3, 4), (9, 2), (1, 1), (20, 14)]
IS_PADDING = torch.arange(280) >= torch.tensor([[12], [18], [1], [280]])
shifts = st.sampled_from([(0.0, 0.0), (0.0, 0.5), (-0.3, -0.3), (0.5, 0.5)])
options = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["bilinear", "bicubic"]),
        "align_corners": st.booleans(),
        "ar_preserving": st.booleans(),
    }
)


@pytest.mark.skipif(not NEW_TIMM, reason="older timm takes whole coordinates for its flag")
@pytest.mark.parametrize("table_size", [(6, 5), (33, 40), (128, 128), (1, 7)], ids=str)
@given(options, shifts, st.booleans())
@torch.no_grad()
def test_timms_flag_at_any_coordinate(table_size, how, shift, is_padding_told):
    case = Case(sizes=SIZES, table_size=table_size, channels=16, use_grid_sample=True, **how)
    embeds = case.embeds()
    coord = case.coord()
    coord = coord + torch.empty(coord.shape).uniform_(*shift)
    if is_padding_told:
        coord[IS_PADDING] = -1
    want, got = torch.zeros(2, *coord.shape[:2], 16)
    stock(case, embeds, want, coord)
    graphs.add_plain(got, whole(read_embeds(embeds)[0]), coord, case.spec(samples=True))
    largest = max(1, *(table.abs().max() for table in tables(embeds)))
    assert (got - want).abs().max() <= 2e-6 * largest


@pytest.mark.parametrize(
    ("cell", "names_none"),
    [
        ((0, 4287), False),
        ((0, 4288), True),
        ((-1, 0), True),
        ((0, -1), True),
        # Their number overflows.
        ((2**24 - 1, 2**40 - 1), True),
        ((2**40 - 1, 2**24 - 1), True),
    ],
)
def test_tokens_of_a_grid_without_cells_or_with_too_many_become_nan(cell, names_none):
    place, embedded = graphs.token_positions(torch.tensor([[cell] * 3]), ResizeSpec())
    assert embedded.all()
    for position in (place.y, place.x):
        assert torch.equal(position.isnan(), torch.full((1, 3), names_none))


def test_coordinates_of_8_bits_are_counted_in_more():
    flag = ResizeSpec("bilinear", antialias=False, samples=True)
    coord = torch.full((1, 1, 2), 255, dtype=torch.uint8)
    assert graphs.token_positions(coord, flag)[0].h.item() == 256


@pytest.mark.skipif(not hasattr(torch.Tag, "cudagraph_unsafe"), reason="older torch has no tag")
def test_no_cuda_graph_may_hold_the_operator():
    assert torch.Tag.cudagraph_unsafe in graphs.add_learned._opoverload.tags


@pytest.mark.parametrize("operator", [graphs.add_learned, graphs.learned_grad])
def test_a_graph_that_another_release_left_on_disk_is_not_found(operator):
    """The compiler finds it by the names of its operators, and the backward pass is in it."""
    assert re.sub(r"\W", "_", __version__) in operator._opoverload.name()
