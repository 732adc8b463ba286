"""Why sums in place leave a tensor alone. What each tracer gets is shown in behaviour/test_transforms.py."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from timm_naflex_fast.tracing import is_tracing, why_unsupported


def test_why_unsupported_names_the_tensor():
    assert why_unsupported(torch.ones(2), torch.nn.Parameter(torch.ones(2))) is None
    mine = torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {}))
    assert why_unsupported(mine) == "a tensor of the class Mine"
    assert why_unsupported(torch.ones(2, device="meta")) == "a meta tensor"
    with forward_ad.dual_level():
        assert why_unsupported(torch.ones(2)) is None  # the level is the process's, the tangent the tensor's
        assert why_unsupported(forward_ad.make_dual(torch.ones(2), torch.ones(2))) == "forward-mode differentiation"
    with FakeTensorMode() as fake:
        assert is_tracing() and why_unsupported(fake.from_tensor(torch.ones(2))) is None
    assert not is_tracing()
