"""Where there is no float64, autocast rounds no product, in the backward pass either."""

import torch

from timm_naflex_fast.resampling import precision


def gradients(a, b):
    result = precision.product(a, b)
    return result, *torch.autograd.grad(result.square().sum(), (a, b))


def test_a_backward_pass_inside_autocast_rounds_nothing(monkeypatch):
    monkeypatch.setattr(precision, "context_of", lambda *tensors: "other_device")
    a, b = torch.randn(2, 5, 5).requires_grad_().unbind()
    want = gradients(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(a, b)
        assert (a @ b).dtype is torch.bfloat16
    for one, other in zip(got, want):
        assert torch.equal(one, other)
