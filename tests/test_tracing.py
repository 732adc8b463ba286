"""Who records or transforms what this thread computes, and no other thread's work."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from timm_naflex_fast.tracing import recorded, tracer, why_unsupported


@pytest.mark.parametrize(
    ("run", "answer"),
    [
        (lambda ask: ask(torch.ones(2)), (None, False)),
        (lambda ask: make_fx(ask)(torch.ones(2)), ("export", True)),
        (lambda ask: torch.jit.trace(ask, torch.ones(2)), ("export", True)),
        (lambda ask: torch.func.vmap(ask)(torch.ones(2)), ("transform", False)),
        (lambda ask: torch.func.grad(lambda x: ask(x).sum())(torch.ones(2)), ("transform", False)),
    ],
    ids=["eager", "make_fx", "jit.trace", "vmap", "grad"],
)
def test_tracer(run, answer):
    found = []

    def ask(x):
        found.append((tracer(x), recorded()))
        return x * 2

    run(ask)
    assert found[0] == answer


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
