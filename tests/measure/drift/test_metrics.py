"""The figures of drift, on tensors whose answers are known by hand."""

import pytest
import torch
import torch.nn.functional as F

from timm_naflex_fast.measure.drift.metrics import agreement, cosine_distance, nearest, relative_rms


def test_relative_rms_by_hand():
    assert relative_rms(torch.tensor([9.0, 16.0]), torch.tensor([1.0, 81.0])) == pytest.approx((25 / 82) ** 0.5)
    assert relative_rms(torch.zeros(2), torch.zeros(2)) == relative_rms(torch.empty(0), torch.empty(0)) == 0
    assert relative_rms(torch.ones(1), torch.zeros(1)) == float("inf")


def test_cosine_distance_by_hand():
    ours, reference = (
        torch.tensor([[1.0, 0], [0, 2], [3, 3], [-1, 0]]),
        torch.tensor([[5.0, 0], [1, 0], [1, 0], [1, 0]]),
    )
    expected = torch.tensor([0, 1, 1 - 0.5**0.5, 2], dtype=torch.float64)
    torch.testing.assert_close(cosine_distance(ours, reference), expected, atol=1e-12, rtol=0)
    tiny = cosine_distance(torch.tensor([[1.0, 1e-6]]), torch.tensor([[1.0, 0.0]]))
    assert tiny.item() == pytest.approx(5e-13, rel=1e-4), "small angles are not lost"


def test_nearest_by_hand():
    rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 2.0]])
    assert nearest(rows).tolist() == [1, 0, 3, 2]
    assert agreement(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 0, 4])) == 0.75
    many = torch.randn(1500, 8)
    directions = F.normalize(many.double(), dim=-1)
    expected = (directions @ directions.t()).fill_diagonal_(-2).argmax(-1)
    assert torch.equal(nearest(many), expected), "more than one part of the similarity matrix"
