"""Reading the grids of a batch from its coordinates."""

import pytest
import torch

from tests.support.oracles import Largest
from timm_naflex_fast.functional import add_pos_embed_
from timm_naflex_fast.names import STRATEGY_NAMES


def add(coord, **options):
    """The embeddings of a table of ones."""
    x = torch.zeros(*coord.shape[:2], 8)
    return add_pos_embed_(x, torch.ones(3, 3, 8), coord, **options)


def only(y, x, tokens):
    """The coordinates of one sample whose tokens all lie in one cell."""
    return torch.tensor([[[y, x]]]).expand(1, tokens, 2)


def test_a_grid_may_have_64_cells_for_each_token_and_4096_more():
    for cell, length in [((64, 63), 1), ((63, 67), 4)]:  # 65 x 64 = 64 * 1 + 4096 cells
        add(only(*cell, length))

    message = r"a grid of more than 64 x 1 \+ 4096 = 4160 cells: 19 x 219;"
    with pytest.raises(ValueError, match=message):
        add(only(18, 218, 1))


@pytest.mark.parametrize("is_turned", [False, True])
def test_the_longest_grid_beside_negative_padding_is_an_error_that_names_its_size(is_turned):
    coord = torch.tensor([[[2**31 - 2, 0]] * 2, [[0, 0], [-1, -1]]])
    coord = coord.flip(-1) if is_turned else coord
    with pytest.raises(ValueError, match=r"sample 0 .* cells: .*2147483647"):
        add(coord)


def test_only_timms_own_calls_resize_the_square():
    far = only(0, 499, 4)
    for strategy in STRATEGY_NAMES:
        with Largest() as largest:
            x = add(far, strategy=strategy, ar_preserving=True)
        is_square = largest.elements > 600 * 8  # of (500, 500), not of (1, 500)
        assert is_square == (strategy == "interpolate_cached")
        torch.testing.assert_close(x, torch.ones(1, 4, 8))
