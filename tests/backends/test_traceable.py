"""The plain operations gather where a table is large; see contract/ for their result."""

from functools import partial

import pytest
import torch

from tests.support.checks import by_backend, run
from tests.support.oracles import NEW_TIMM, Case, relative, stock
from timm_naflex_fast.backends import traceable

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


def test_tokens_that_lost_their_neighbours_are_right():
    case = Case(sizes=[(90, 90)])
    embeds, coord = case.embeds(), case.coord()
    want = torch.zeros(1, 8100, 4)
    kept = torch.arange(90) * 91  # the diagonal: as many rows as tokens
    with torch.no_grad():
        stock(case, embeds, want, coord)
        got = ours(case, embeds, torch.zeros(1, 90, 4), coord[:, kept])
    torch.testing.assert_close(got, want[:, kept], atol=2e-6, rtol=0)
