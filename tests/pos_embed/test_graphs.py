"""The plain operations and the operator; contract/ and test_grid_sample.py compare their results."""

import re

import pytest
import torch

from timm_naflex_fast import __version__
from timm_naflex_fast.pos_embed import graphs
from timm_naflex_fast.pos_embed.table import ResizeSpec


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
