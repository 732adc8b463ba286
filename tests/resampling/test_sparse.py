"""The sparse sums of the resize steps: how much they read; contract/ compares what they give."""

import pytest
import torch

from tests.support.oracles import reference
from timm_naflex_fast.resampling.dense import definition
from timm_naflex_fast.resampling.sparse import resample, resize_steps
from timm_naflex_fast.resampling.spec import OLDER_FLAG, ResizeSpec

BICUBIC = ResizeSpec("bicubic")
RADIO = ResizeSpec("bilinear", antialias=False, align_corners=True, ar_preserving=True)
ONE_HEIGHT = [(17, 18), (17, 20), (17, 25)]


def steps_of(h, w, table_size, spec, transpose=False):
    return resize_steps(h, w, table_size, spec, transpose, torch.float32, torch.device("cpu"))


def test_a_step_reads_only_what_pytorch_reads():
    (step,) = steps_of(5, 9, (40, 33), RADIO)
    unit_tables = torch.eye(40 * 33).view(40, 33, -1)
    is_read = reference(unit_tables, (5, 9), RADIO) != 0
    assert is_read.sum() <= len(step.indices) <= 4 * 5 * 9


def test_backward_a_radio_grid_leaves_most_of_the_table_alone():
    (step,) = steps_of(16, 20, (128, 128), RADIO, transpose=True)
    assert len(step.rows) <= 4 * 16 * 20


@pytest.fixture
def sums(monkeypatch):
    """One entry for each sparse sum that runs."""
    done = []
    embedding_bag = torch.embedding_bag

    def count(*args, **kwargs):
        done.append(1)
        return embedding_bag(*args, **kwargs)

    monkeypatch.setattr(torch, "embedding_bag", count)
    return done


@pytest.mark.parametrize(
    "spec",
    [BICUBIC, ResizeSpec(antialias=False, reference=OLDER_FLAG, batch_max=(17, 25))],
    ids=str,
)
def test_grids_of_one_height_share_the_sum_along_y(sums, spec):
    table = torch.randn(32, 32, 4)
    got = dict(resample(table, ONE_HEIGHT, spec, torch.float32))
    assert len(sums) == 1 + 3
    exact = definition(table.double(), ONE_HEIGHT, spec)
    for size, want in exact:
        torch.testing.assert_close(got[size].double(), want, atol=5e-6, rtol=0)
