"""The products of dense matrices that autograd differentiates again: second derivatives."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad

from tests.support.checks import Watch, by_functions
from tests.support.oracles import BASE, Case, relative, stock

# It has a grid of the table's size, which timm does not resize to a square first.
SQUARES = Case(sizes=[(4, 5), (6, 5)], ar_preserving=True)
# One image is the whole batch.
ALONE = Case(sizes=[(3, 4)])
# Another token than the last tells the height, and another one the width.
TURNED = [*reversed(range(12)), *range(12, 30)]


def in_timms_order(case, embeds, x, coord):
    """timm knows grids in their order alone."""
    in_order = stock(case, embeds, torch.zeros_like(x), case.coord())
    return x + in_order[:, TURNED[: case.length]]


def derivatives(add, case, is_frozen):
    """Batches of gradients, their tangents, and second derivatives."""
    embeds = case.embeds().requires_grad_(not is_frozen)
    x = case.x().requires_grad_()
    leaves = [x] if is_frozen else [x, embeds.pos_embed]
    out = add(case, embeds, x * 1, case.coord()[:, TURNED[: case.length]])
    upstream = torch.stack((out, -out)).detach()
    batched = torch.autograd.grad(out, leaves, upstream, retain_graph=True, is_grads_batched=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(*upstream)
        duals = torch.autograd.grad(out, leaves, dual, retain_graph=True)
        tangents = [forward_ad.unpack_dual(grad).tangent for grad in duals]
    grads = torch.autograd.grad((out**3).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)
    return [*batched, *tangents, *second]


@pytest.mark.parametrize("case", [BASE, SQUARES, ALONE], ids=["", "squares", "alone"])
@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("mode", [nullcontext(), Watch(lambda *_: None)], ids=["", "seen"])
def test_batches_of_gradients_tangents_and_second_derivatives_equal_timms(
    case, strategy, is_frozen, mode
):
    wants = derivatives(in_timms_order, case, is_frozen)
    with mode:
        gots = derivatives(partial(by_functions, strategy=strategy), case, is_frozen)
    for got, want in zip(gots, wants, strict=True):
        assert want.abs().max() > 0
        assert relative(got, want) <= 1e-5
