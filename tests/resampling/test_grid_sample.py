"""grid_sample: timm's own flag, the formula of timm issue 2514, and how far both are from timm's default."""

import pytest
import torch
import torch.nn.functional as F
from checks import HALF, run
from hypothesis import given, settings
from oracles import NEW_TIMM, Case, cases, relative, row_major, stock, tables

import timm_naflex_fast
from timm_naflex_fast.functional import add_factorized_pos_embed_, add_pos_embed_
from timm_naflex_fast.patching import timm as replacements
from timm_naflex_fast.resampling import grid_sample
from timm_naflex_fast.resampling.matrices import Resampling


def ours(case, embeds, x, coord):
    """Through the patch, which picks the installed timm's positions."""
    with timm_naflex_fast.enable(mode="grid_sample", model=embeds):
        getattr(embeds, f"_apply_{case.kind}_naflex_pos_embed")(x, patch_coord=coord)
    return x


def check(case):
    embeds, coord = case.embeds(), case.coord()
    want, want_gx, want_gp = run(stock, case, embeds, coord)
    got, got_gx, got_gp = run(ours, case, embeds, coord)
    assert relative(got, want) <= max(1e-6, 2 * torch.finfo(case.dtype).eps)
    assert torch.equal(got_gx, want_gx)
    if case.dtype == torch.float32:
        assert all(relative(a, b) <= 1e-5 for a, b in zip(got_gp, want_gp))


@settings(max_examples=200)
@given(cases(use_grid_sample=True, dtypes=(torch.float32, *HALF)))
def test_learned_equals_timms_flag(case):
    check(case)


@settings(max_examples=150)
@given(cases(kind="factorized", use_grid_sample=True, antialias=True, align_corners=False))
def test_factorized_equals_timms_flag(case):
    check(case)


def issue_2514(table, x, coords, mode, align_corners, padding_mode):
    """The dense-grid proposal of timm issue 2514, written from its description."""
    sizes = coords.amax(1) + 1
    rows, cols = sizes.amax(0).tolist()
    scale = torch.tensor([rows, cols]) / sizes  # (y, x)
    theta = torch.zeros(len(x), 2, 3)
    theta[:, 0, 0], theta[:, 1, 1] = scale[:, 1], scale[:, 0]
    theta[:, :, 2] = scale.flip(1) - 1
    images = table.permute(2, 0, 1).expand(len(x), -1, -1, -1)
    where = F.affine_grid(theta, (len(x), table.shape[-1], rows, cols), align_corners=align_corners)
    sampled = F.grid_sample(images, where, mode=mode, align_corners=align_corners, padding_mode=padding_mode)
    return x + torch.stack([sampled[b, :, coords[b, :, 0], coords[b, :, 1]].t() for b in range(len(x))])


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("padding_mode", ["zeros", "border"])
@pytest.mark.parametrize("dense", [True, False])
def test_equals_the_formula_of_issue_2514(mode, padding_mode, dense):
    generator = torch.Generator().manual_seed(0)
    sizes = [tuple(s) for s in torch.randint(4, 32, (12, 2), generator=generator).tolist()]
    coords = row_major(sizes)
    table, x = torch.randn(32, 32, 5), torch.randn(12, coords.shape[1], 5)
    want = issue_2514(table, x, coords, mode, False, padding_mode)
    got = x.clone()
    how = Resampling(mode)
    grid_sample.add_learned(got, table, coords, how, padding_mode=padding_mode, dense_positions=dense)
    # Positions straight from coordinates round otherwise than a dense affine grid: 32 cells magnify that.
    torch.testing.assert_close(got, want, atol=2e-6 if dense else 5e-5, rtol=0)
    how = dict(strategy="grid_sample", mode=mode, padding_mode=padding_mode, dense_positions=dense)
    assert torch.equal(add_pos_embed_(x.clone(), table, coords, **how), got)


def test_zeros_and_border_padding_differ_at_the_edge():
    table, coords = torch.ones(4, 4, 2), row_major([(8, 8)])
    out = [
        add_pos_embed_(torch.zeros(1, 64, 2), table, coords, strategy="grid_sample", mode="bilinear", padding_mode=p)
        for p in ("border", "zeros")
    ]
    assert (out[0] == 1).all() and out[1][0, 0, 0] < 0.6  # a corner token sees two faded borders


def test_drifts_from_timms_default_where_the_table_shrinks():
    case = Case((16, 16), 8, "bicubic", True, False, False, [(6, 6), (5, 9)], 45, torch.float32, 7)
    embeds, coord = case.embeds(), case.coord()
    want, got = torch.zeros(2, 45, 8), torch.zeros(2, 45, 8)
    with torch.no_grad():
        stock(case, embeds, want, coord)
        ours(case, embeds, got, coord)
    assert relative(got[:, :36], want[:, :36]) > 0.3


def test_makes_no_device_sync_and_adds_to_reordered_tokens_their_own_cell(monkeypatch):
    case = Case((6, 5), 4, "bilinear", True, False, False, [(3, 4)], 12, torch.float32, 7)
    embeds, coord = case.embeds(), case.coord()
    order = torch.randperm(12)

    def no_sync(*args, **kwargs):
        raise AssertionError("read back to the host")

    monkeypatch.setattr(torch.Tensor, "tolist", no_sync)
    for read in ("item", "__int__", "__bool__", "__index__"):
        monkeypatch.setattr(torch.Tensor, read, no_sync)
    add = add_pos_embed_
    with torch.no_grad():
        straight = add(torch.zeros(1, 12, 4), embeds.pos_embed, coord, strategy="grid_sample", mode="bilinear")
        shuffled = add(
            torch.zeros(1, 12, 4), embeds.pos_embed, coord[:, order], strategy="grid_sample", mode="bilinear"
        )
    assert torch.equal(shuffled, straight[:, order])


@pytest.mark.skipif(not NEW_TIMM, reason="one form of positions is enough on old timm")
def test_old_timms_dense_positions_agree_with_the_new(monkeypatch):
    case = Case((6, 5), 4, "bicubic", True, False, True, [(3, 4), (9, 2)], 20, torch.float32, 7)
    embeds, coord = case.embeds(), case.coord()
    new = ours(case, embeds, torch.zeros(2, 20, 4), coord)
    monkeypatch.setattr(replacements, "_dense", lambda: True)
    old = ours(case, embeds, torch.zeros(2, 20, 4), coord)
    torch.testing.assert_close(old, new, atol=1e-5, rtol=0)


def test_functional_factorized():
    case = Case((6, 5), 4, "bilinear", True, False, False, [(3, 4), (9, 2)], 18, torch.float32, 7, "factorized", True)
    embeds, coord = case.embeds(), case.coord()
    want = torch.zeros(2, 18, 4)
    stock(case, embeds, want, coord)
    got = add_factorized_pos_embed_(torch.zeros(2, 18, 4), *tables(embeds), coord, strategy="grid_sample")
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
