"""PyTorch's own checks of operators hold. Results and gradients: contract/."""

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
