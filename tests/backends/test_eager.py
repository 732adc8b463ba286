"""Nothing as large as the tokens is kept for the backward pass, and the chosen strategy alone runs."""

import torch

from tests.support.checks import by_functions
from tests.support.oracles import BASE, Case
from timm_naflex_fast.strategies import STRATEGIES


def test_saved_nothing_of_the_size_of_x():
    embeds, saved = BASE.embeds(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape), lambda t: t):
        by_functions(BASE, embeds, BASE.x().requires_grad_().clone(), BASE.coord())
    assert saved == []


def test_no_strategy_but_the_chosen_one_runs(monkeypatch):
    case, ran = Case(length=30), []
    for name, strategy in STRATEGIES.items():
        resample = lambda *a, name=name, resample=strategy.resample: ran.append(name) or resample(*a)
        monkeypatch.setattr(strategy, "resample", resample, raising=False)
    by_functions(case, case.embeds(), case.x() * 1, case.coord())
    assert ran == ["matmul"]
