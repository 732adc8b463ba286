"""The one product of docs/how-it-works.md, as it is printed there, against timm's loop."""

import re
from pathlib import Path

import pytest
import torch
from torch.export import Dim

from tests.support.oracles import Case, relative, stock

PAGE = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text()
(COPY,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
exec(COPY, SCOPE := {})
BATCHES = [[(3, 4), (9, 2), (6, 5), (12, 14), (2, 15)], [(1, 6), (7, 7)], [(5, 3)]]


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_a_copy_of_the_one_product_is_timms_loop_in_one_graph_and_exported(mode):
    """Values and gradients."""
    assert len(COPY.strip().splitlines()) <= 35

    class Add(torch.nn.Module):
        def forward(self, x, table, coord):
            return x + SCOPE["position_embeddings"](table, coord, mode)

    def batch(sizes):
        case = Case(mode=mode, sizes=sizes)
        return case, case.x(), case.embeds().pos_embed[0], case.coord()

    free = {0: Dim("B", max=64), 1: Dim("N", min=2, max=512)}
    program = torch.export.export(
        Add(), batch(BATCHES[0])[1:], dynamic_shapes=(free, None, free)
    ).module()
    compiled = torch.compile(Add(), fullgraph=True, dynamic=True, backend="eager")
    for sizes in BATCHES:
        case, x, table, coord = batch(sizes)
        embeds, want = case.embeds(), x.clone()
        stock(case, embeds, want, coord)
        real = torch.arange(x.shape[1]) < torch.tensor(
            [[h * w] for h, w in sizes]
        )  # padding means nothing
        weight = torch.randn(x.shape) * real[..., None]
        (want_grad,) = torch.autograd.grad(want, embeds.pos_embed, weight)
        for add in (Add(), program, compiled):
            got = add(x, table, coord)
            assert (got - want)[real].abs().max() <= 2e-6 * max(1, table.abs().max())
            assert relative(torch.autograd.grad(got, table, weight)[0], want_grad[0]) <= 1e-5
