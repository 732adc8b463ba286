"""The one product of docs/how-it-works.md, as it is printed there, against timm's loop."""

import re
from pathlib import Path

import pytest
import torch
from torch.export import Dim

from tests.support.checks import one_by_one
from tests.support.oracles import relative, row_major

PAGE = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text()
(COPY,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
SCOPE = {}
exec(COPY, SCOPE)
BATCHES = [[(3, 4), (9, 2), (6, 5), (12, 14), (2, 15)], [(1, 6), (7, 7)], [(5, 3)]]


class Embeddings(torch.nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.mode = mode

    def forward(self, table, coord):
        return SCOPE["position_embeddings"](table, coord, self.mode)


def ways_of(mode, table):
    """The copy as it is, exported, and compiled."""
    free = {0: Dim("B", max=64), 1: Dim("N", min=2, max=512)}
    example = table, row_major(BATCHES[0])
    program = torch.export.export(Embeddings(mode), example, dynamic_shapes=(None, free))
    compiled = torch.compile(Embeddings(mode), fullgraph=True, dynamic=True, backend="eager")
    return Embeddings(mode), program.module(), compiled


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_a_copy_of_the_one_product_is_timms_loop_in_one_graph_and_exported(mode):
    """Values and gradients."""
    table = torch.randn(6, 5, 4, requires_grad=True)
    ways = ways_of(mode, table)
    for sizes in BATCHES:
        coord = row_major(sizes)
        tokens = torch.tensor([[h * w] for h, w in sizes])
        real = torch.arange(coord.shape[1]) < tokens  # padding means nothing
        want = torch.cat(one_by_one(table, sizes, mode=mode))  # (tokens, C)
        weight = torch.randn(want.shape)
        (want_grad,) = torch.autograd.grad((want * weight).sum(), table)
        for embed in ways:
            got = embed(table, coord)[real]
            (grad,) = torch.autograd.grad((got * weight).sum(), table)
            assert (got - want).abs().max() <= 2e-6 * max(1, table.abs().max())
            assert relative(grad, want_grad) <= 1e-5
