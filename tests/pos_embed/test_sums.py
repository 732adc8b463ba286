"""The sparse sums: how much they read; contract/ compares what they give."""

from unittest import mock

import pytest
import torch
from torch.nn.functional import interpolate

from timm_naflex_fast.functional import resample_pos_embed, resample_pos_embeds

RADIO = dict(mode="bilinear", antialias=False, align_corners=True, ar_preserving=True)


def test_a_grid_reads_four_cells_of_the_table_for_each_of_its_own_and_backward_fills_no_more():
    table = torch.randn(128, 128, 4, dtype=torch.float64, requires_grad=True)
    with mock.patch.object(torch, "embedding_bag", wraps=torch.embedding_bag) as sums:
        resample_pos_embed(table, (16, 20), **RADIO).sum().backward()
    forward, backward = (call.args for call in sums.call_args_list)
    for _, taps, _ in (forward, backward):
        assert len(taps) <= 4 * 16 * 20
    assert len(forward[2]) == 16 * 20  # sums
    assert len(backward[2]) <= 4 * 16 * 20


@pytest.mark.parametrize(
    ("sizes", "by_sums"),
    [([(5, 7)], False), ([(5, 7), (6, 4)], True), ([(32, 33)], True)],
    ids=["one small grid", "two grids", "many numbers"],
)
def test_one_small_bilinear_grid_without_antialiasing_is_timms_own_call(sizes, by_sums):
    table = torch.randn(8, 8, 512)
    with mock.patch.object(torch, "embedding_bag", wraps=torch.embedding_bag) as sums:
        got = resample_pos_embeds(table, sizes, mode="bilinear", antialias=False)
    assert bool(sums.call_args_list) == by_sums
    want = []
    for size in sizes:
        resized = interpolate(table.permute(2, 0, 1)[None], size, mode="bilinear")
        want.append(resized[0].flatten(1).t())
    off = 2e-6 * table.abs().max() if by_sums else 0
    assert (got - torch.cat(want)).abs().max() <= off
