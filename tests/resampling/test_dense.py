"""The products of dense matrices that autograd differentiates again: second derivatives."""

from functools import partial

import pytest
import torch

from tests.support.checks import by_functions
from tests.support.oracles import BASE, Case, reference, relative, row_major, stock
from timm_naflex_fast.functional import add_pos_embed_
from timm_naflex_fast.resampling.spec import ResizeSpec

EXACT = ["matmul", "interpolate_cached"]
# It has a grid of the table's size, which timm does not resize to a square first.
SQUARES = Case(sizes=[(4, 5), (6, 5)], ar_preserving=True)


def second_derivative(add, case):
    embeds = case.embeds()
    out = case.x().requires_grad_() * 1
    add(case, embeds, out, case.coord())
    (grad,) = torch.autograd.grad((out**3).sum(), embeds.pos_embed, create_graph=True)
    grad.square().sum().backward()
    return embeds.pos_embed.grad


@pytest.mark.parametrize("case", [BASE, SQUARES])
@pytest.mark.parametrize("strategy", EXACT)
def test_second_derivatives_equal_timms(case, strategy):
    want = second_derivative(stock, case)
    assert want.abs().max() > 0
    got = second_derivative(partial(by_functions, strategy=strategy), case)
    assert relative(got, want) <= 1e-5


# Another token than the last tells the height, and another one the width.
WITHOUT_LAST_CELL = row_major([(4, 5)])[:, :19].flip(1)


def by_ours(x, table):
    return add_pos_embed_(x * 1, table, WITHOUT_LAST_CELL, mode="bicubic")


def dense_products(x, table):
    embeddings = reference(table.double(), (4, 5), ResizeSpec("bicubic")).flatten(0, 1)
    return x + embeddings[None, :19].flip(1)


def derivatives(add, inputs, leaves):
    """Batches of gradients, and second derivatives."""
    out = add(*inputs)
    upstream = torch.stack((out, -out)).detach()
    batched = torch.autograd.grad(out, leaves, upstream, retain_graph=True, is_grads_batched=True)
    grads = torch.autograd.grad((out**3).sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)
    return [*batched, *second]


@pytest.mark.parametrize("is_frozen", [False, True])
def test_second_derivatives_without_the_last_cell(is_frozen):
    x = torch.randn(1, 19, 4)
    table = torch.randn(6, 5, 4)
    found = []
    for add in (by_ours, dense_products):
        inputs = [x.clone(), table.clone()]
        leaves = inputs[:1] if is_frozen else inputs
        for leaf in leaves:
            leaf.requires_grad_()
        found.append(derivatives(add, inputs, leaves))

    for got, want in zip(*found, strict=True):
        assert relative(got, want) <= 1e-5
