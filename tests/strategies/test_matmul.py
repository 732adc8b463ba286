"""The sparse sums and their transposes are each other's derivatives, whatever the table is."""

import pytest
import torch

from tests.support.checks import run
from tests.support.oracles import NEW_TIMM, Case, relative, row_major, stock, tables
from timm_naflex_fast.backends import eager
from timm_naflex_fast.functional import add_factorized_pos_embed_, add_pos_embed_
from timm_naflex_fast.resampling.grids import group_grids
from timm_naflex_fast.resampling.matrices import ResizeSpec
from timm_naflex_fast.strategies import STRATEGIES


def ours(case, embeds, x, coord):
    if case.kind == "learned":
        return add_pos_embed_(x, embeds.pos_embed, coord, **case.options)
    return add_factorized_pos_embed_(x, *tables(embeds), coord, ar_preserving=case.ar_preserving)


def add_in_float64(x, tables, coord, spec):
    groups, counts = group_grids(coord, x, embeds_padding=spec.embeds_padding)
    eager.add_groups(x, tuple(tables), groups, counts, spec, STRATEGIES["matmul"], torch.float64)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("table", [(6, 5), (40, 33)], ids=["dense", "taps"])
@pytest.mark.parametrize("antialias", [True, False])
def test_gradcheck_learned(mode, table, antialias):
    spec = ResizeSpec(mode, antialias, False, table == (6, 5))
    coord = row_major([(3, 4), (7, 2), (3, 4)])
    coord[1] = coord[1].flip(0)  # and one sample whose tokens are reordered
    values = torch.randn(1, *table, 2, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, coord.shape[1], 2, dtype=torch.float64, requires_grad=True)

    def f(x, values):
        out = x * 1
        add_in_float64(out, (values,), coord, spec)
        return out

    assert torch.autograd.gradcheck(f, (x, values), fast_mode=table != (6, 5))


@pytest.mark.parametrize("ar", [True, False])
def test_gradcheck_factorized(ar):
    coord = row_major([(3, 4), (7, 2), (3, 4)])
    lines = [torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 7)]
    x = torch.randn(3, coord.shape[1], 3, dtype=torch.float64, requires_grad=True)

    def f(x, *lines):
        out = x * 1
        add_in_float64(out, lines, coord, ResizeSpec("linear", ar_preserving=ar))
        return out

    assert torch.autograd.gradcheck(f, (x, *lines))


def test_matrices_built_in_inference_mode_serve_training():
    case = Case(sizes=[(5, 37)], table_size=(13, 3))  # sizes no test met
    embeds, coord = case.embeds(), case.coord()
    with torch.inference_mode():
        ours(case, embeds, case.x(), coord)
    want, _, want_grads = run(stock, case, embeds, coord)
    got, _, got_grads = run(ours, case, embeds, coord)
    torch.testing.assert_close(got, want, atol=5e-6, rtol=0)
    assert relative(got_grads[0], want_grads[0]) <= 1e-5


@pytest.mark.skipif(not NEW_TIMM, reason="this timm has no antialias setting")
def test_radio_table():
    case = Case(
        sizes=[(16, 48), (31, 30)],
        table_size=(128, 128),
        channels=3,
        mode="bilinear",
        antialias=False,
        align_corners=True,
        ar_preserving=True,
    )
    embeds, coord = case.embeds(), case.coord()
    want, _, want_gp = run(stock, case, embeds, coord)
    got, _, got_gp = run(ours, case, embeds, coord)
    torch.testing.assert_close(got, want, atol=2e-6 * 5, rtol=0)
    assert relative(got_gp[0], want_gp[0]) <= 1e-5
