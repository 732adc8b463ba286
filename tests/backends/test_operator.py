"""One operator adds, the other is its gradient; PyTorch's own checks of operators hold."""

import pytest
import torch

from tests.support.oracles import row_major
from timm_naflex_fast.backends import operator


@pytest.mark.parametrize("sampler", ["interpolate", "grid_sample"])
def test_operator_passes_opcheck(sampler):
    spec = ("bicubic", sampler == "interpolate", False, False, sampler)
    x = torch.randn(2, 12, 4, requires_grad=True)
    table = torch.randn(6, 5, 4, requires_grad=True)
    coord = row_major([(3, 4), (2, 2)])
    torch.library.opcheck(operator.add_learned, (x, table, coord, *spec))
    torch.library.opcheck(operator.learned_grad, (x.detach().requires_grad_(), coord, 6, 5, *spec))


def test_the_operators_are_each_others_gradients():
    x, g = (torch.randn(3, 13, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    table = torch.randn(6, 5, 2, dtype=torch.float64, requires_grad=True)
    coord, settings = row_major([(3, 4), (5, 2), (3, 4)], 13), ("bicubic", True, False, False, "interpolate")
    add, grad_ = operator.add_learned, operator.learned_grad
    options = dict(eps=1e-2, atol=1e-4)  # the sums are float32
    assert torch.autograd.gradcheck(lambda x, t: add(x, t, coord, *settings)[0], (x, table), **options)
    assert torch.autograd.gradcheck(lambda g: grad_(g, coord, 6, 5, *settings), (g,), **options)
