"""Closed-form resize weights against PyTorch's own, read off F.interpolate."""

import itertools

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from timm_naflex_fast.pos_embed.formula import axis_weights, divide
from timm_naflex_fast.pos_embed.table import ResizeSpec
from timm_naflex_fast.pos_embed.weights import axis_matrix

sizes = st.integers(1, 140) | st.sampled_from([190, 288])
BOTH = [True, False]
LINEAR = ResizeSpec("linear", False, False)
SPECS = [ResizeSpec(*how) for how in itertools.product(["bilinear", "bicubic"], BOTH, BOTH)]
SPECS.append(LINEAR)
ROUNDS_ONCE = torch.__version__.startswith(("2.11.", "2.14."))


def allowed(n0, spec):
    """How far a weight may be from PyTorch's."""
    if spec.interpolation == "bilinear" and spec.antialias:
        return 2e-7
    # The builds of torch 2.11 and 2.14 round the position in 1-D once instead of twice; those of
    # 2.4 and 2.15 do not.
    if spec is LINEAR and ROUNDS_ONCE:
        return max(n0 * 2**-24, 1e-6)
    return 1e-6


@given(sizes, sizes, st.sampled_from(SPECS))
@example(41, 288, LINEAR)  # where it counts that PyTorch rounds twice
@example(66, 70, ResizeSpec("bilinear", True, False))  # where PyTorch leaves a cell out
def test_rows_are_those_of_the_resize_matrix(n, n0, spec):
    # Longer, PyTorch resizes the one-channel basis by yet another kernel.
    if spec.interpolation == "bilinear" and not spec.antialias:
        n = min(n, 124)
    want = axis_matrix(n, n0, spec, torch.float32)
    exact = axis_matrix(n, n0, spec, torch.float64)

    got = axis_weights(torch.arange(n).float(), torch.tensor([n]).float(), n0, spec)

    assert (got - want).abs().max() <= allowed(n0, spec)
    assert (got - exact).abs().max() <= 1.5 * (want - exact).abs().max() + 2e-7
    ones = torch.ones(n)  # float32
    torch.testing.assert_close(got.sum(1), ones, atol=5e-7, rtol=0)


def test_a_stretched_filter_is_divided_as_pytorch_divides_it():
    """By a product with 1 / scale. The quotient was off by 1.8e-7 here, and farther from float64."""
    spec = ResizeSpec("bilinear", True, True)
    want = axis_matrix(4, 11, spec, torch.float32)
    got = axis_weights(torch.arange(4.0), torch.tensor([4.0]), 11, spec)
    torch.testing.assert_close(got, want, atol=5e-8, rtol=0)


MOST = 2048  # numerators up to this are divided exactly


class RoundsTwice(torch.Tensor):
    """Numbers that divide as OpenVINO's do."""

    def __rtruediv__(self, a):
        return a * self.as_subclass(torch.Tensor).reciprocal()


@pytest.mark.parametrize("runtime", [torch.Tensor, RoundsTwice])
def test_quotients_are_rounded_once(runtime):
    a = torch.arange(MOST + 1.0)
    divided = 0
    for n in torch.arange(1.0, MOST // 2 + 1).split(64):
        n = n[:, None]
        want = (a.double() / n.double()).float()
        assert torch.equal(divide(a, n.as_subclass(runtime)), want)
        divided += want.numel()
    assert divided == (MOST + 1) * MOST // 2
