"""The products of dense matrices that autograd differentiates again: second derivatives."""

from functools import partial

import pytest
import torch

from tests.support.checks import by_functions, during
from tests.support.oracles import BASE, Case, reference, relative, row_major, stock
from timm_naflex_fast.functional import add_pos_embed_, resample_pos_embeds
from timm_naflex_fast.resampling.matrices import ResizeSpec


def second_derivative(add, case):
    embeds, out = case.embeds(), case.x().requires_grad_() * 1
    add(case, embeds, out, case.coord())
    (grad,) = torch.autograd.grad((out**3).sum(), embeds.pos_embed, create_graph=True)
    grad.square().sum().backward()
    return embeds.pos_embed.grad


# The second one has a grid of the table's size, which timm does not resize to a square first.
@pytest.mark.parametrize("case", [BASE, Case(sizes=[(4, 5), (6, 5)], ar_preserving=True)])
@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])
def test_second_derivatives_equal_timms(case, strategy):
    want = second_derivative(stock, case)
    assert want.abs().max() > 0
    assert relative(second_derivative(partial(by_functions, strategy=strategy), case), want) <= 1e-5


@pytest.mark.parametrize("how", ["eager", "frozen table", "compile"])
def test_second_derivatives_without_the_last_cell(how):
    """Another token than the last tells the height, and another one the width."""
    coord, x, table, got = (
        row_major([(4, 5)])[:, :19].flip(1),
        torch.randn(1, 19, 4),
        torch.randn(6, 5, 4),
        [],
    )
    ours = lambda x, table: add_pos_embed_(x * 1, table, coord, mode="bicubic")
    for add in (
        torch.compile(ours, backend="eager", fullgraph=True)
        if how == "compile"
        else ours,  # AOTAutograd has none
        lambda x, table: (
            x
            + reference(table.double(), (4, 5), ResizeSpec("bicubic"))
            .flatten(0, 1)[None, :19]
            .flip(1)
        ),
    ):
        inputs = x.clone(), table.clone()
        leaves = [
            leaf.requires_grad_() for leaf in (inputs[:1] if how == "frozen table" else inputs)
        ]
        out = add(*inputs)
        grads = torch.autograd.grad((out**3).sum(), leaves, create_graph=True)
        batched = torch.autograd.grad(
            out, leaves, torch.stack((out, -out)).detach(), True, is_grads_batched=True
        )
        got.append(
            [*batched, *torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)]
        )
    assert all(relative(*both) <= 1e-5 for both in zip(*got))


@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])
@pytest.mark.parametrize(
    "sizes", [[(20, 1)], [(6, 5), (20, 1)], [(3, 4), (9, 1), (20, 1)]], ids=str
)
def test_second_derivatives_of_grids_of_one_column(strategy, sizes):
    """Of which PyTorch's own are wrong, and so timm's; whatever the default dtype is."""
    numbers, found, spec = torch.randn(6, 5, 3), [], ResizeSpec("bilinear")
    for embed in (
        lambda table: resample_pos_embeds(table, sizes, mode="bilinear", strategy=strategy),
        lambda table: torch.cat(
            [reference(table.double(), size, spec).flatten(0, 1) for size in sizes]
        ),
    ):
        table = numbers.clone().requires_grad_()
        with during(torch.set_default_dtype, torch.bfloat16, after=torch.float32):
            first = torch.autograd.grad((embed(table) ** 3).sum(), table, create_graph=True)[0]
            found.append([first, *torch.autograd.grad(first.square().sum(), table)])
    assert all(relative(*both) <= 1e-5 for both in zip(*found))
