"""The plain operations gather where a table is large; see contract/ for their result."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.support.checks import by_backend, run
from tests.support.oracles import NEW_TIMM, Case, relative, stock, tables
from timm_naflex_fast.backends import traceable
from timm_naflex_fast.resampling.matrices import ResizeSpec

ours = partial(by_backend, backend=traceable)


@pytest.mark.skipif(not NEW_TIMM, reason="this timm has no antialias setting")
@pytest.mark.parametrize(("mode", "side"), [("bilinear", 128), ("bicubic", 130)])
def test_large_table_without_antialias_is_gathered(mode, side, monkeypatch):
    options = dict(mode=mode, antialias=False, align_corners=True, ar_preserving=True)
    case = Case(sizes=[(16, 48), (31, 30)], table_size=(side, 128), channels=3, length=930, **options)
    embeds, coord = case.embeds(), case.coord()
    want, _, want_gp = run(stock, case, embeds, coord)
    monkeypatch.setattr(traceable, "_by_product", None)
    got, _, got_gp = run(ours, case, embeds, coord)
    torch.testing.assert_close(got, want, atol=2e-6 * 5, rtol=0)
    assert relative(got_gp[0], want_gp[0]) <= 1e-5


@pytest.mark.skipif(not NEW_TIMM, reason="older timm takes whole coordinates for its flag")
@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("ar_preserving", [False, True])
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("table_size", [(6, 5), (33, 40), (128, 128), (1, 7)], ids=str)
def test_timms_flag_at_any_coordinate(table_size, mode, align_corners, ar_preserving, kind):
    options = dict(mode=mode, align_corners=align_corners, ar_preserving=ar_preserving, use_grid_sample=True)
    case = Case(kind=kind, sizes=[(3, 4), (9, 2), (1, 1), (20, 14)], table_size=table_size, channels=16, **options)
    embeds, whole = case.embeds(), case.coord()
    padding = torch.stack([torch.arange(case.length) >= h * w for h, w in case.sizes])[..., None]
    coords = [whole, torch.where(padding, -1, whole)]  # timm looks a factorized table's position up: whole ones
    if kind == "learned":
        coords += [whole + torch.rand(whole.shape) * 0.5, whole - 0.3, torch.where(padding, -1.0, whole + 0.5)]
    reference = "grid_sample" if kind == "learned" else "affine_grid"
    spec = replace(case.spec if kind == "learned" else ResizeSpec("linear", False), reference=reference)
    spec = replace(spec, ar_preserving=ar_preserving)
    for coord in coords:
        want, got = torch.zeros(2, *coord.shape[:2], 16)
        with torch.no_grad():
            stock(case, embeds, want, coord)
            traceable.add(got, tuple(tables(embeds)), coord, spec)
        assert (got - want).abs().max() <= 2e-6 * max(1, *(table.abs().max() for table in tables(embeds)))
