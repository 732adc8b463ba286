"""Nothing as large as the tokens is kept for the backward pass."""

import torch

from tests.support.checks import by_functions
from tests.support.oracles import BASE


def test_saved_nothing_of_the_size_of_x():
    embeds, saved = BASE.embeds(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape), lambda t: t):
        by_functions(BASE, embeds, BASE.x().requires_grad_().clone(), BASE.coord())
    assert saved == []
