"""The measures of drift on tensors with known answers, and what counts as the same choice."""

import pytest
import torch
import torch.nn.functional as F

from timm_naflex_fast.measure.drift.measures import (
    classes,
    cosine_distance,
    nearest,
    precision,
    relative_rms,
    same_nearest,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_relative_rms_by_hand():
    moved = torch.tensor([9.0, 16.0])
    assert relative_rms(moved, torch.tensor([1.0, 81.0])) == pytest.approx((25 / 82) ** 0.5)
    assert relative_rms(torch.zeros(2), moved) == 0


def test_cosine_distance_by_hand():
    ours = torch.tensor([[1.0, 0], [0, 2], [-1, 0], [1, 1e-6]])
    timms = torch.tensor([[5.0, 0], [1, 0], [1, 0], [1, 0]])
    distances = cosine_distance(ours, timms).tolist()
    assert distances == pytest.approx([0, 1, 2, 5e-13], rel=1e-4, abs=0)


def test_nearest_of_more_rows_than_are_compared_at_once():
    rows = torch.randn(1500, 8)
    directions = F.normalize(rows.double(), dim=-1)
    similar = (directions @ directions.t()).fill_diagonal_(-2)
    assert torch.equal(nearest(rows), similar.argmax(-1))


def on_a_circle(*angles):
    angles = torch.tensor(angles, dtype=torch.float64)
    return torch.stack([angles.cos(), angles.sin()], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("times", "share"), [(0.5, 1), (2, 2 / 3)])
def test_a_neighbour_is_another_where_it_is_farther_by_more_than_rounding(dtype, times, share):
    # Seen from the first row, the second is nearer to timm, by as many times the precision.
    apart = times * precision(dtype)
    timms = on_a_circle(0, 0.5, -0.5 - apart)
    ours = on_a_circle(0, 0.5, -0.5 + apart)
    assert nearest(timms).tolist() == [1, 0, 0] and nearest(ours).tolist() == [2, 0, 0]
    assert same_nearest(ours, timms, dtype) == pytest.approx(share)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("times", "found"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("scale", [1 / 64, 64])
def test_a_class_is_another_where_timms_logit_is_smaller_by_more_than_rounding(
    dtype, times, found, scale
):
    apart = times * torch.finfo(dtype).eps
    if dtype == torch.float32:
        apart = times * precision(dtype)
    timms = scale * torch.tensor([[-1.0, 1.0, 1 - apart], [0.0, 1.0, 0.0]]).to(dtype)
    ours = timms.clone()
    ours[0, 2] = 2 * scale
    assert classes(ours, timms).tolist() == [found, 1]
    assert classes(timms, timms).tolist() == [1, 1]
