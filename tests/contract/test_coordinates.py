"""Coordinates as nobody should make them: timm's result or a named error, never a wrong answer nor a huge table."""

import itertools
import random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.checks import by_functions
from tests.support.oracles import NEW_TIMM, Case, Largest, relative
from tests.support.running import running
from timm_naflex_fast.resampling.closed_form import axis_weights

EXACT = ["matmul", "interpolate_cached"]


def wanted(table, cells, grid, spec):
    """Each token's embedding (N, C), float64, from the cell it names in a grid (h, w)."""
    lengths = torch.tensor(spec.lengths(*grid))
    sides = (axis_weights(cells[:, a], lengths[a], table.shape[a], spec) for a in (0, 1))
    return torch.einsum("ni,nj,ijc->nc", *sides, table)


NO_CELL = "sample 1 holds a negative or non-finite coord"
TOO_LARGE = r"sample 1 spans a grid of .* at most 64 x 20 \+ 4096"
BAD = dict.fromkeys((float("nan"), float("inf"), float("-inf"), -1, -1e30, 1e30, 2**31), NO_CELL)
FLOATS = torch.float16, torch.bfloat16, torch.float32, torch.float64
BAD |= dict.fromkeys((2**31 - 2, 65504, 2000), TOO_LARGE)


@pytest.mark.parametrize("strategy", [*EXACT, "grid_sample"])
@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize(("dtype", "bad"), [(torch.int64, 2**31), (torch.int64, -1), *itertools.product(FLOATS, BAD)])
def test_what_names_no_cell_or_a_far_one_is_said_and_changes_nothing(strategy, kind, bad, dtype):
    case = Case(sizes=[(4, 5)] * 3, channels=2, kind=kind)
    embeds, coord, x = case.embeds(), case.coord(dtype), torch.zeros(3, 20, 2)
    coord[1, 7, 1] = torch.tensor(bad).to(dtype)
    message = NO_CELL if dtype in FLOATS[:3] and bad == 2**31 - 2 else BAD[bad]  # rounded to 2**31
    with Largest() as largest, pytest.raises(ValueError, match=message):
        by_functions(case, embeds, x, coord, strategy)
    assert (x == 0).all() and largest.elements < 5000


VALUES = [0, 1, 7, 63, 255, 1000, 40_000, 2**31 - 2, 2**31, 2**62]


def scribbled(rng, coord):
    """Coordinates with some values replaced, tokens exchanged or given twice, axes exchanged."""
    coord = coord.clone()
    batch, length = coord.shape[:2]
    for _ in range(rng.randint(0, 3)):
        sample, token = rng.randrange(batch), rng.randrange(length)
        kind = rng.choice(["value", "swap", "overlap", "negative", "axis"])
        if kind in ("value", "negative"):
            coord[sample, token, rng.randrange(2)] = rng.choice(VALUES if kind == "value" else [-1, -5, -(2**40)])
        elif kind in ("swap", "overlap"):
            other = rng.randrange(length)
            coord[sample, [token, other]] = coord[sample, [other, token if kind == "swap" else other]]
        else:
            coord[sample] = coord[sample].flip(-1)
    return coord


def check_coordinates(seed):
    """One random table, batch and scribble: every strategy gives each token the cell it names, or a named error."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sizes = [(rng.randint(1, 12), rng.randint(1, 12)) for _ in range(rng.randint(1, 4))]
    new = dict(antialias=rng.random() < 0.7, align_corners=rng.random() < 0.3) if NEW_TIMM else {}
    shape = dict(table_size=(rng.randint(1, 9), rng.randint(1, 9)), channels=rng.randint(2, 4))  # PyTorch errs with one
    options = dict(mode=rng.choice(["bilinear", "bicubic"]), ar_preserving=rng.random() < 0.3)
    length = max(1, max(h * w for h, w in sizes) + rng.choice([0, 0, 2, -3]))
    case = Case(**shape, **options, **new, sizes=sizes, length=length, seed=seed)
    embeds, coord = case.embeds(), scribbled(rng, case.coord())
    dtype, mode = rng.choice([torch.int64, torch.int64, torch.float64]), rng.choice(EXACT)
    x, got = case.x(), case.x()
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
            return False
    assert largest.elements <= 5000 * case.channels * case.length
    table, want = embeds.pos_embed[0].detach().double().requires_grad_(), x.double()
    for sample, cells in enumerate(coord):
        h, w = (cells.amax(0) + 1).tolist()
        n = min(case.length, h * w)
        cells = cells[:n]
        assert cells.min() >= 0
        own_size = (h, w) == case.table_size
        want[sample, :n] += table[cells[:, 0], cells[:, 1]] if own_size else wanted(table, cells, (h, w), case.spec)
        assert torch.equal(got[sample, n:], x[sample, n:])
    torch.testing.assert_close(got.double(), want, atol=5e-6, rtol=1e-6)
    upstream = torch.randn_like(got)
    grads = torch.autograd.grad(got, embeds.pos_embed, upstream) + torch.autograd.grad(want, table, upstream.double())
    assert relative(*grads) <= 1e-5
    return True


@given(st.integers(0, 2**32 - 1))
@example(3234)  # one token far away in a row: with ar_preserving its square would be resized
def test_scribbled_coordinates(seed):
    check_coordinates(seed)


def test_scribbles_leave_some_batches_valid_and_some_not():
    valid = sum(check_coordinates(seed) for seed in range(40))
    assert 10 < valid < 40
