"""Coordinates as nobody should make them.

timm's result or a named error, never a wrong answer nor a huge table.
"""

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.checks import by_functions, one_by_one
from tests.support.oracles import Case, Largest, cases, relative
from timm_naflex_fast import enable, status

EXACT = ["matmul", "interpolate_cached"]
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
NO_CELL = "sample 1 holds a negative or non-finite coord"
TOO_LARGE = r"sample 1 spans a grid of .* at most 64 x 20 \+ 4096"
NAMES_NO_CELL = [float("nan"), float("inf"), float("-inf"), -1, -1e30, 1e30, 2**31]
FAR = [65504, 2000]
BAD = [*itertools.product(FLOATS, NAMES_NO_CELL + FAR), (torch.float64, 2**31 - 2)]
BAD += [(torch.int64, 2**31 - 2), (torch.int64, 2**31), (torch.int64, -1)]


@pytest.mark.parametrize("strategy", [*EXACT, "grid_sample"])
@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_what_names_no_cell_or_a_far_one_is_said_and_changes_nothing(strategy, kind):
    case = Case(sizes=[(4, 5)] * 3, channels=2, kind=kind)
    embeds = case.embeds()
    for dtype, bad in BAD:
        coord = case.coord(dtype)
        coord[1, 7, 1] = torch.tensor(bad).to(dtype)
        x = torch.zeros(3, 20, 2)
        message = NO_CELL if bad in NAMES_NO_CELL else TOO_LARGE
        with Largest() as largest, pytest.raises(ValueError, match=message):
            by_functions(case, embeds, x, coord, strategy)
        assert (x == 0).all()
        assert largest.elements < 5000


VALUES = [0, 1, 7, 63, 255, 1000, 40_000, 2**31 - 2, 2**31, 2**62, -1, -5, -(2**40)]


@st.composite
def scribbled(draw):
    """A batch, and its coordinates: some swapped, others with another number."""
    case = draw(cases(largest=12))
    coord = case.coord()
    token = st.integers(0, case.length - 1)
    number = st.one_of(st.integers(0, 12), st.sampled_from(VALUES))
    for _ in range(draw(st.integers(0, 3))):
        tokens = coord[draw(st.integers(0, len(coord) - 1))]
        one, other = draw(token), draw(token)
        tokens[[one, other]] = tokens[[other, one]]
        if draw(st.booleans()):
            tokens[one, draw(st.integers(0, 1))] = draw(number)
    return case, coord


def with_one_far(value, **settings):
    """A batch with one token far away in a row."""
    case = Case(sizes=[(8, 12), (9, 5)], **settings)
    coord = case.coord()
    coord[-1, 2, 0] = value
    return case, coord


def is_refused(case, coord, mode):
    """Whether these coordinates have to be an error."""
    if coord.min() < 0 or coord.max() >= 2**31 - 1:
        return True
    sizes = coord.amax(1).double() + 1  # (B, 2)
    cells = sizes.prod(1)
    if mode == "interpolate_cached" and case.ar_preserving:
        cells = sizes.amax(1).square()  # the square is resized
    return bool(cells.max() > 64 * case.length + 4096)


def check_by_cells(case, embeds, coord, x, got):
    """Each token got the embedding of the cell that it names, and the table its gradient."""
    table = embeds.pos_embed[0].detach().double().requires_grad_()
    want = x.double()
    for sample, cells in enumerate(coord):
        h, w = (cells.amax(0) + 1).tolist()
        count = min(case.length, h * w)
        assert cells[:count].min() >= 0
        (grid,) = one_by_one(table, [(h, w)], **case.options)
        want[sample, :count] += grid.view(h, w, -1)[cells[:count, 0], cells[:count, 1]]
        assert torch.equal(got[sample, count:], x[sample, count:])
    torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=1e-6)
    (grad,) = torch.autograd.grad(got, embeds.pos_embed, x)
    (want_grad,) = torch.autograd.grad(want, table, x.double())
    assert relative(grad, want_grad) <= 1e-5


@given(scribbled(), st.sampled_from([torch.int64, torch.float64]), st.sampled_from(EXACT))
@example(with_one_far(1000, ar_preserving=True), torch.int64, "interpolate_cached")
@example(with_one_far(20), torch.float64, "matmul")  # which is still resized
def test_each_token_gets_the_cell_that_it_names_or_a_named_error(scribble, dtype, mode):
    case, coord = scribble
    embeds = case.embeds()
    x = case.x()
    got = case.x()
    error = None
    with enable(mode, rope="stock", patch_embed="stock"), Largest() as largest:
        try:
            embeds._apply_learned_naflex_pos_embed(got, patch_coord=coord.to(dtype))
        except ValueError as raised:
            error = raised
        assert error or status().calls == {("pos_embed", mode): 1}

    if error is not None:
        assert "patch_coord of sample" in str(error)
        assert is_refused(case, coord, mode)
        assert torch.equal(got, x)
    else:
        assert largest.elements <= 5000 * case.channels * case.length
        check_by_cells(case, embeds, coord, x, got)
