"""Coordinates as nobody should make them: timm's result or a named error, never a wrong answer nor
a huge table."""

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.checks import by_functions
from tests.support.oracles import Case, Largest, cases, relative
from tests.support.running import running
from timm_naflex_fast.resampling.closed_form import axis_weights

EXACT = ["matmul", "interpolate_cached"]


def wanted(table, cells, grid, spec):
    """Each token's embedding (N, C), float64, from the cell it names in a grid (h, w)."""
    lengths = torch.tensor(spec.resized_size(*grid))
    sides = (axis_weights(cells[:, a], lengths[a], table.shape[a], spec) for a in (0, 1))
    return torch.einsum("ni,nj,ijc->nc", *sides, table)


NO_CELL = "sample 1 holds a negative or non-finite coord"
TOO_LARGE = r"sample 1 spans a grid of .* at most 64 x 20 \+ 4096"
BAD = dict.fromkeys((float("nan"), float("inf"), float("-inf"), -1, -1e30, 1e30, 2**31), NO_CELL)
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
BAD |= dict.fromkeys((2**31 - 2, 65504, 2000), TOO_LARGE)


@pytest.mark.parametrize("strategy", [*EXACT, "grid_sample"])
@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize(
    ("dtype", "bad"), [(torch.int64, 2**31), (torch.int64, -1), *itertools.product(FLOATS, BAD)]
)
def test_what_names_no_cell_or_a_far_one_is_said_and_changes_nothing(strategy, kind, bad, dtype):
    case = Case(sizes=[(4, 5)] * 3, channels=2, kind=kind)
    embeds, coord, x = case.embeds(), case.coord(dtype), torch.zeros(3, 20, 2)
    coord[1, 7, 1] = torch.tensor(bad).to(dtype)
    message = NO_CELL if dtype in FLOATS[:3] and bad == 2**31 - 2 else BAD[bad]  # rounded to 2**31
    with Largest() as largest, pytest.raises(ValueError, match=message):
        by_functions(case, embeds, x, coord, strategy)
    assert (x == 0).all() and largest.elements < 5000


VALUES = [0, 1, 7, 63, 255, 1000, 40_000, 2**31 - 2, 2**31, 2**62]


@st.composite
def scribbled(draw):
    """A batch and its coordinates with some values replaced, tokens exchanged or given twice, axes
    exchanged."""
    case = draw(cases(largest=12))
    coord, token = case.coord(), st.integers(0, case.length - 1)
    for kind in draw(
        st.lists(st.sampled_from(["value", "negative", "swap", "overlap", "axis"]), max_size=3)
    ):
        tokens, one = coord[draw(st.integers(0, len(coord) - 1))], draw(token)
        if kind in ("value", "negative"):
            values = VALUES if kind == "value" else [-1, -5, -(2**40)]
            tokens[one, draw(st.integers(0, 1))] = draw(st.sampled_from(values))
        elif kind == "axis":
            tokens[:] = tokens.flip(-1)
        else:
            other = draw(token)
            tokens[[one, other]] = tokens[[other, one if kind == "swap" else other]]
    return case, coord


def with_one_far(case, value):
    coord = case.coord()
    coord[-1, 2, 0] = value
    return case, coord


@given(scribbled(), st.sampled_from([torch.int64, torch.float64]), st.sampled_from(EXACT))
# One token far away in a row: with ar_preserving its square would be resized.
@example(
    with_one_far(Case(sizes=[(8, 12), (9, 5)], ar_preserving=True), 1000),
    torch.int64,
    "interpolate_cached",
)
@example(
    with_one_far(Case(sizes=[(8, 12), (9, 5)]), 20), torch.float64, "matmul"
)  # which is still resized
def test_each_token_gets_the_cell_that_it_names_or_a_named_error(scribble, dtype, mode):
    case, coord = scribble
    embeds, x, got = case.embeds(), case.x(), case.x()
    with running(mode, rope="stock", patch_embed="stock"), Largest() as largest:
        try:
            embeds._apply_learned_naflex_pos_embed(got, patch_coord=coord.to(dtype))
        except ValueError as error:
            assert "patch_coord of sample" in str(error)
            cells = (coord.amax(1).double() + 1).prod(1).max()
            if mode == "interpolate_cached" and case.ar_preserving:
                cells = (coord.amax((1, 2)).double() + 1).square().max()
            assert coord.min() < 0 or coord.max() >= 2**31 - 1 or cells > 64 * case.length + 4096
            assert torch.equal(got, x)
            return
    assert largest.elements <= 5000 * case.channels * case.length
    table, want = embeds.pos_embed[0].detach().double().requires_grad_(), x.double()
    for sample, cells in enumerate(coord):
        h, w = (cells.amax(0) + 1).tolist()
        n = min(case.length, h * w)
        cells = cells[:n]
        assert cells.min() >= 0
        own_size = (h, w) == case.table_size
        want[sample, :n] += (
            table[cells[:, 0], cells[:, 1]] if own_size else wanted(table, cells, (h, w), case.spec)
        )
        assert torch.equal(got[sample, n:], x[sample, n:])
    torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=1e-6)
    grads = torch.autograd.grad(got, embeds.pos_embed, x) + torch.autograd.grad(
        want, table, x.double()
    )
    assert relative(*grads) <= 1e-5
