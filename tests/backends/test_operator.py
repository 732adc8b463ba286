"""One operator adds, the other is its gradient; PyTorch's own checks of operators hold."""

import pytest
import torch

from tests.support.oracles import row_major
from timm_naflex_fast.backends import operator, portable
from timm_naflex_fast.resampling.matrices import ResizeSpec


@pytest.mark.parametrize("sampler", ["interpolate", "grid_sample"])
def test_operator_passes_opcheck(sampler):
    spec = ("bicubic", sampler == "interpolate", False, False, sampler)
    x = torch.randn(2, 12, 4, requires_grad=True)
    table = torch.randn(6, 5, 4, requires_grad=True)
    coord = row_major([(3, 4), (2, 2)])
    torch.library.opcheck(operator.on_host.add, (x, table, coord, *spec))
    torch.library.opcheck(operator.on_host.grad, (x.detach().requires_grad_(), coord, 6, 5, *spec))


def test_operator_gradients_and_untouched_padding():
    table = torch.randn(1, 6, 5, 4, dtype=torch.float64, requires_grad=True)
    coord, spec = row_major([(3, 4), (6, 5), (2, 2)]), ResizeSpec("bicubic")
    coord[0] = coord[0].flip(0).roll(12, 0)
    x = torch.full((3, 30, 4), -0.0, dtype=torch.float64)
    want, got = x.clone(), x.clone()
    portable.add(want, (table,), coord, spec)
    operator.add(got, (table,), coord, spec)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=0)
    assert torch.signbit(got[2, 4:]).all()
    grads = [torch.autograd.grad(out.square().sum(), table)[0] for out in (got, want)]
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-5)


def test_the_operators_are_each_others_gradients():
    x, table = torch.randn(3, 13, 2, dtype=torch.float64), torch.randn(6, 5, 2, dtype=torch.float64)
    settings = ("bicubic", True, False, False, "interpolate")
    x, table, g = (t.requires_grad_() for t in (x, table, torch.randn_like(x)))
    add, grad_ = operator.on_host
    options = dict(eps=1e-2, atol=1e-4)  # the sums are float32
    assert torch.autograd.gradcheck(
        lambda x, t: add(x, t, row_major([(3, 4), (5, 2), (3, 4)], 13), *settings)[0], (x, table), **options
    )
    assert torch.autograd.gradcheck(
        lambda g: grad_(g, row_major([(3, 4), (5, 2), (3, 4)], 13), 6, 5, *settings), (g,), **options
    )
