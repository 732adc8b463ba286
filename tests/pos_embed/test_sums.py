"""The sparse sums: how much they read; contract/ compares what they give."""

from unittest import mock

import torch

from timm_naflex_fast.functional import resample_pos_embed

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
