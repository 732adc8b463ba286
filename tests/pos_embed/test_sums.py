"""The sparse sums of the resize steps: how much they read; contract/ compares what they give."""

import torch

from tests.support.oracles import reference
from timm_naflex_fast.pos_embed.sums import resize_steps
from timm_naflex_fast.pos_embed.table import ResizeSpec

RADIO = ResizeSpec("bilinear", antialias=False, align_corners=True, ar_preserving=True)


def steps_of(h, w, table_size, spec, transpose=False):
    return resize_steps((h, w), table_size, spec, transpose, torch.float32, torch.device("cpu"))


def test_a_step_reads_only_what_pytorch_reads():
    (step,) = steps_of(5, 9, (40, 33), RADIO)
    unit_tables = torch.eye(40 * 33).view(40, 33, -1)
    is_read = reference(unit_tables, (5, 9), RADIO) != 0
    assert is_read.sum() <= len(step.indices) <= 4 * 5 * 9


def test_backward_a_radio_grid_leaves_most_of_the_table_alone():
    (step,) = steps_of(16, 20, (128, 128), RADIO, transpose=True)
    assert len(step.rows) <= 4 * 16 * 20
