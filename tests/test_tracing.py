"""Who records or transforms what this thread computes, and no other thread's work."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from timm_naflex_fast.tracing import recorded, tracer, why_unsupported


def test_tracer():
    found, one = [], torch.ones(2)

    def ask(x):
        found.append((tracer(x), recorded()))
        return x * 2

    ask(one), make_fx(ask)(one), torch.jit.trace(ask, one, check_trace=False)
    torch.func.vmap(ask)(one), torch.func.grad(lambda x: ask(x).sum())(one)
    assert found == [(None, False), *[("export", True)] * 2, *[("transform", False)] * 2]


def test_why_unsupported_names_the_tensor():
    assert why_unsupported(torch.ones(2), torch.nn.Parameter(torch.ones(2))) is None
    mine = torch.ones(2).as_subclass(type("Mine", (torch.Tensor,), {}))
    assert why_unsupported(mine) == "a tensor of the class Mine"
    assert why_unsupported(torch.ones(2, device="meta")) == "a meta tensor"
    with forward_ad.dual_level():
        assert why_unsupported(torch.ones(2)) is None  # the level is the process's, the tangent the tensor's
        assert why_unsupported(forward_ad.make_dual(torch.ones(2), torch.ones(2))) == "forward-mode differentiation"
    with FakeTensorMode() as fake:
        assert recorded() and why_unsupported(fake.from_tensor(torch.ones(2))) is None
    assert not recorded()
