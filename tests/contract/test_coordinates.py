"""Coordinates as nobody should make them.

timm's result or a named error, never a wrong answer nor a huge table.
"""

import itertools

import pytest
import torch

from tests.support.checks import by_functions
from tests.support.oracles import Case, Largest
from timm_naflex_fast.pos_embed.strategies import EXACT

FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
MESSAGE = r"sample 1 holds a negative or non-finite coord.* more than 64 x 20 \+ 4096 = 5376 cells"
NAMES_NO_CELL = [float("nan"), float("inf"), float("-inf"), -1, -1e30, 1e30, 2**31 - 1]
FAR = [65504, 2000]
BAD = [*itertools.product(FLOATS, NAMES_NO_CELL + FAR), (torch.float64, 2**31 - 2)]
BAD += [(torch.int64, 2**31 - 2), (torch.int64, 2**31 - 1), (torch.int64, -1)]


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [*itertools.product(["learned"], EXACT), ("factorized", "matmul")],
)
def test_what_names_no_cell_or_a_far_one_is_said_and_changes_nothing(strategy, kind):
    case = Case(sizes=[(4, 5)] * 3, channels=2, kind=kind)
    embeds = case.embeds()
    for dtype, bad in BAD:
        coord = case.coord(dtype)
        coord[1, 7, 1] = torch.tensor(bad).to(dtype)
        x = torch.zeros(3, 20, 2)
        with Largest() as largest, pytest.raises(ValueError, match=MESSAGE):
            by_functions(case, embeds, x, coord, strategy)
        assert (x == 0).all()
        assert largest.elements < 5000
