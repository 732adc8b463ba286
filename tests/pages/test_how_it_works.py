"""The one product of docs/how-it-works.md, as it is printed there, against timm's loop."""

import re
from pathlib import Path

import pytest
import torch
from torch.export import Dim

from tests.support.oracles import Case, relative, stock

PAGE = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text()
(COPY,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
SCOPE = {}
exec(COPY, SCOPE)
BATCHES = [[(3, 4), (9, 2), (6, 5), (12, 14), (2, 15)], [(1, 6), (7, 7)], [(5, 3)]]


class Add(torch.nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def forward(self, x, table, coord):
        return x + SCOPE["position_embeddings"](table, coord, self.mode)


def case_of(sizes, mode):
    """A batch and its table, and what Add takes."""
    case = Case(mode=mode, sizes=sizes)
    embeds = case.embeds()
    return case, embeds, (case.x(), embeds.pos_embed[0], case.coord())


def ways_of(mode):
    """The copy as it is, exported, and compiled."""
    *_, example = case_of(BATCHES[0], mode)
    images = Dim("B", max=64)
    tokens = Dim("N", min=2, max=512)
    free = {0: images, 1: tokens}
    program = torch.export.export(Add(mode), example, dynamic_shapes=(free, None, free))
    compiled = torch.compile(Add(mode), fullgraph=True, dynamic=True, backend="eager")
    return Add(mode), program.module(), compiled


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_a_copy_of_the_one_product_is_timms_loop_in_one_graph_and_exported(mode):
    """Values and gradients."""
    ways = ways_of(mode)
    for sizes in BATCHES:
        case, embeds, (x, table, coord) = case_of(sizes, mode)
        want = x.clone()
        stock(case, embeds, want, coord)
        tokens = torch.tensor([[h * w] for h, w in sizes])
        real = torch.arange(x.shape[1]) < tokens  # padding means nothing
        weight = torch.randn(x.shape) * real[..., None]
        (want_grad,) = torch.autograd.grad(want, embeds.pos_embed, weight)
        for add in ways:
            got = add(x, table, coord)
            (grad,) = torch.autograd.grad(got, table, weight)
            assert (got - want)[real].abs().max() <= 2e-6 * max(1, table.abs().max())
            assert relative(grad, want_grad[0]) <= 1e-5
