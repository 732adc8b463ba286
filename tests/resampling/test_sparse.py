"""The sparse sums of the resize steps: how much they read; contract/ compares what they give."""

import torch

from tests.support.oracles import reference
from timm_naflex_fast.batch.grids import GridGroup, ResamplePlan
from timm_naflex_fast.resampling import dense
from timm_naflex_fast.resampling.matrices import ResizeSpec
from timm_naflex_fast.resampling.sparse import resample, resize_steps


def steps_of(h, w, table_size, spec, transpose=False):
    return resize_steps(h, w, table_size, spec, transpose, torch.float32, torch.device("cpu"))


def test_steps_read_only_what_pytorch_reads():
    spec = ResizeSpec("bilinear", antialias=False, align_corners=True, ar_preserving=True)
    (sums,) = steps_of(5, 9, (40, 33), spec)
    read = reference(torch.eye(40 * 33).view(40, 33, -1), (5, 9), spec) != 0
    assert read.sum() <= len(sums.indices) <= 4 * 5 * 9
    assert (
        sums.indices.dtype is sums.offsets.dtype is torch.int32
        and sums.weights.dtype is torch.float32
    )
    (sums,) = steps_of(16, 20, (128, 128), spec, True)
    assert len(sums.rows) <= 4 * 16 * 20  # backward a RADIO grid leaves most of the table alone
    for step in steps_of(17, 18, (32, 32), ResizeSpec("bicubic"), True):
        assert step.indices.dtype is step.offsets.dtype is torch.int32 and step.weights.all()


def test_grids_of_one_height_share_the_sum_along_y(monkeypatch):
    summed, bag = [], torch.embedding_bag
    monkeypatch.setattr(torch, "embedding_bag", lambda *a, **k: summed.append(1) or bag(*a, **k))
    table, spec = torch.randn(32, 32, 4), ResizeSpec("bicubic")
    groups = [GridGroup(17, w, [i]) for i, w in enumerate((18, 20, 25))]
    assert [len(steps_of(group.h, group.w, (32, 32), spec)) for group in groups] == [2, 2, 2]
    for way in (ResizeSpec(reference="affine_grid", batch_max=(17, 25)), spec):
        plan = ResamplePlan(groups, [], way, torch.float32)
        summed.clear()
        for (_, cells), (_, want) in zip(
            resample((table,), plan), dense.resample((table[None],), plan)
        ):
            torch.testing.assert_close(cells.double(), want, atol=5e-6, rtol=0)
    assert len(summed) == 1 + 3
    list(resample((table,), plan._replace(spec=ResizeSpec("bilinear", antialias=False))))
    assert len(summed) == 1 + 3  # by PyTorch's own resize, which reads only what it needs
