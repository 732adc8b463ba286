"""Nothing as large as the tokens is kept for the backward pass, and the chosen strategy alone runs."""

import torch

from tests.support.oracles import BASE, Case, tables
from timm_naflex_fast.functional import add_factorized_pos_embed_, add_pos_embed_
from timm_naflex_fast.strategies import STRATEGIES


def ours(case, embeds, x, coord):
    if case.kind == "learned":
        return add_pos_embed_(x, embeds.pos_embed, coord, **case.options)
    return add_factorized_pos_embed_(x, *tables(embeds), coord, ar_preserving=case.ar_preserving)


def test_saved_nothing_of_the_size_of_x():
    embeds, saved = BASE.embeds(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape), lambda t: t):
        ours(BASE, embeds, BASE.x().requires_grad_().clone(), BASE.coord())
    assert saved == []


def test_no_strategy_but_the_chosen_one_runs(monkeypatch):
    case, ran = Case(length=30), []
    for name, strategy in STRATEGIES.items():
        resample = lambda *a, name=name, resample=strategy.resample: ran.append(name) or resample(*a)
        monkeypatch.setattr(strategy, "resample", resample, raising=False)
    ours(case, case.embeds(), case.x() * 1, case.coord())
    assert ran == ["matmul"]
