"""grid_sample: equals timm's own flag, and differs from timm's default."""

import pytest
import torch
import torch.nn.functional as F
from checks import HALF, run
from hypothesis import given
from oracles import NEW_TIMM, Case, cases, relative, stock, tables

import timm_naflex_fast
from timm_naflex_fast.functional import add_factorized_pos_embed_, add_pos_embed_


def ours(case, embeds, x, coord):
    """Through the patch, which picks the installed timm's positions."""
    with timm_naflex_fast.enable(mode="grid_sample", model=embeds):
        getattr(embeds, f"_apply_{case.kind}_naflex_pos_embed")(x, patch_coord=coord)
    return x


def direct(case, embeds, x, coord):
    """By the plain functions."""
    if case.kind == "factorized":
        return add_factorized_pos_embed_(x, *tables(embeds), coord, strategy="grid_sample")
    return add_pos_embed_(x, embeds.pos_embed, coord, strategy="grid_sample", mode=case.mode)


def check(case):
    embeds, coord = case.embeds(), case.coord()
    want, want_gx, want_gp = run(stock, case, embeds, coord)
    got, got_gx, got_gp = run(ours, case, embeds, coord)
    assert relative(got, want) <= max(1e-6, 2 * torch.finfo(case.dtype).eps)
    assert torch.equal(got_gx, want_gx)
    if case.dtype == torch.float32:
        assert all(relative(a, b) <= 1e-5 for a, b in zip(got_gp, want_gp))


@pytest.mark.ran("grid_sample")
@given(cases(use_grid_sample=True, dtypes=(torch.float32, *HALF)))
def test_learned_equals_timms_flag(case):
    check(case)


@pytest.mark.ran("grid_sample")
@given(cases(kind="factorized", use_grid_sample=True, antialias=True, align_corners=False))
def test_factorized_equals_timms_flag(case):
    check(case)


@pytest.mark.ran("grid_sample")
def test_drifts_from_timms_default_where_the_table_shrinks():
    case = Case((16, 16), 8, "bicubic", True, False, False, [(6, 6), (5, 9)], 45, torch.float32, 7)
    embeds, coord = case.embeds(), case.coord()
    want, got = torch.zeros(2, 45, 8), torch.zeros(2, 45, 8)
    with torch.no_grad():
        stock(case, embeds, want, coord)
        ours(case, embeds, got, coord)
    assert relative(got[:, :36], want[:, :36]) > 0.3


@pytest.mark.ran("grid_sample")
def test_reordered_and_padding_tokens_get_the_cell_of_their_coordinate():
    case = Case((6, 5), 4, "bilinear", True, False, False, [(3, 4), (5, 2)], 15, torch.float32, 7, "learned", True)
    embeds, coord = case.embeds(), case.coord()
    order = torch.randperm(12)
    coord[0, :12] = coord[0, order]
    coord[1, 12] = torch.tensor((4, 1))  # behind the grid's 10 tokens, and no (0, 0)
    want, want_gx, want_gp = run(stock, case, embeds, coord)
    for add in (ours, direct):
        got, got_gx, got_gp = run(add, case, embeds, coord)
        assert relative(got, want) <= 1e-6 and torch.equal(got_gx, want_gx) and relative(got_gp[0], want_gp[0]) <= 1e-5


@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_padding_that_names_no_cell_counts_as_the_first(kind):
    case = Case((6, 5), 4, "bilinear", True, False, False, [(3, 4), (5, 2)], 15, torch.float32, 7, kind, True)
    embeds, coord = case.embeds(), case.coord()
    want = direct(case, embeds, torch.zeros(2, 15, 4), coord)
    coord[0, 12:], coord[1, 10:] = -1, -7
    assert torch.equal(direct(case, embeds, torch.zeros(2, 15, 4), coord), want)


@pytest.mark.ran("grid_sample")
@given(cases(use_grid_sample=True))
def test_within_2e_6_and_as_close_to_float64_as_timms_flag(case):
    embeds, coord = case.embeds(), case.coord()
    want, got = torch.zeros(2, len(case.sizes), case.length, case.channels)
    stock(case, embeds.requires_grad_(False), want, coord)
    ours(case, embeds, got, coord)
    largest = max(1.0, embeds.pos_embed.abs().max().item())
    assert (got - want).abs().max() <= 2e-6 * largest


@pytest.mark.ran("grid_sample")
@pytest.mark.parametrize("table,mode", [((64, 48), "bicubic"), ((16, 16), "bilinear"), ((60, 60), "bilinear")])
@pytest.mark.parametrize("align_corners", [False, True])
def test_as_close_to_float64_as_timms_flag(table, mode, align_corners):
    if align_corners and not NEW_TIMM:
        pytest.skip("older timm has no align_corners")
    sizes = [(3, 40), (17, 19), (41, 7), (64, 48), (90, 11)]
    case = Case(table, 64, mode, True, align_corners, False, sizes, 3072, torch.float32, 3, "learned", True)
    embeds, coord = case.embeds().requires_grad_(False), case.coord()
    theirs, mine = torch.zeros(2, 5, 3072, 64)
    stock(case, embeds, theirs, coord)
    ours(case, embeds, mine, coord)
    y, x = (coord.amax(1, keepdim=True) + 1).double().unbind(-1)
    c = coord.double()
    if align_corners:
        where = torch.stack([2 * c[..., 1] / (x - 1) - 1, 2 * c[..., 0] / (y - 1) - 1], -1)
    else:
        where = torch.stack([(2 * c[..., 1] + 1) / x - 1, (2 * c[..., 0] + 1) / y - 1], -1)
    images = embeds.pos_embed.double().permute(0, 3, 1, 2).expand(5, -1, -1, -1)
    exact = F.grid_sample(images, where[:, :, None], mode=mode, padding_mode="border", align_corners=align_corners)
    exact = exact[..., 0].transpose(1, 2)
    assert (mine - exact).abs().max() <= 1.5 * (theirs - exact).abs().max()


def test_runs_no_grid_sample_over_the_tokens(monkeypatch):
    case = Case((6, 5), 4, "bilinear", True, False, False, [(3, 4)], 12, torch.float32, 7, "learned", True)
    embeds = case.embeds()
    want = torch.zeros(1, 12, 4)
    stock(case, embeds, want, case.coord())
    direct(case, embeds, torch.zeros(1, 12, 4), case.coord())  # the matrices are kept now

    def no_more(*args, **kwargs):
        raise AssertionError("F.grid_sample was called")

    monkeypatch.setattr(F, "grid_sample", no_more)
    torch.testing.assert_close(direct(case, embeds, torch.zeros(1, 12, 4), case.coord()), want, atol=2e-6, rtol=0)


def test_functional_factorized():
    case = Case((6, 5), 4, "bilinear", True, False, False, [(3, 4), (9, 2)], 18, torch.float32, 7, "factorized", True)
    embeds, coord = case.embeds(), case.coord()
    want = torch.zeros(2, 18, 4)
    stock(case, embeds, want, coord)
    got = add_factorized_pos_embed_(torch.zeros(2, 18, 4), *tables(embeds), coord, strategy="grid_sample")
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
