"""Races of the position embedding alone: a timed step is what it says, with timm's result."""

from contextlib import ExitStack
from itertools import repeat

import pytest
import torch

from lab.benchmarks import pos_embed
from lab.benchmarks.pos_embed import LEARNED, SAMPLED, WORKLOADS
from tests.support.oracles import STOCK
from tests.support.running import ran
from timm_naflex_fast.commands.measure.bench.workloads import coordinates


@pytest.fixture
def small():
    """Makes races on a small batch; what they switched on stays on until the test ends."""
    with ExitStack() as stack:
        yield lambda phase, *names: pos_embed.sides(
            WORKLOADS["diverse"], 3, phase, names, stack, channels=4
        )


@pytest.mark.parametrize(
    ("name", "timms", "ours"),
    [
        ("stock", LEARNED, []),
        ("timm-flag-bilinear", SAMPLED, []),
        ("interpolate_cached", LEARNED, ["interpolate_cached"]),
        ("grid_sample", SAMPLED, ["grid_sample"]),
        ("matmul", LEARNED, ["matmul"]),
    ],
)
def test_a_training_steps_result_and_gradient_are_timms(name, timms, ours):
    coord = coordinates([(5, 7), (4, 4), (9, 31)])
    embeds = WORKLOADS["diverse"].embeds(4)
    reference = WORKLOADS["diverse"].embeds(4)
    if name == "timm-flag-bilinear":
        reference.pos_embed_interp_mode = "bilinear"
    x, upstream = torch.randn(2, *coord.shape[:2], 4)
    value = torch.randn(1, 32, 32, 4)
    want = x.clone().requires_grad_().clone()
    with ran(*ours), pos_embed.served(name, embeds):
        step = pos_embed.ready(embeds, x, coord, upstream, repeat(value))
        step()
    reference.pos_embed.data.copy_(value)
    STOCK[timms](reference, want, coord)
    want.backward(upstream)
    torch.testing.assert_close(x, want.detach(), atol=2e-5, rtol=0)
    torch.testing.assert_close(
        embeds.pos_embed.grad, reference.pos_embed.grad, atol=1e-4, rtol=1e-5
    )


@ran("matmul")
@pytest.mark.parametrize("phase", ["infer", "frozen", "train"])
def test_the_table_changes_but_for_frozen_and_only_train_goes_backward(phase, small):
    (ready,) = small(phase, "matmul").values()
    added = []
    gradients = []
    for _ in range(2):
        step = ready()
        _, x, _, upstream = step.args
        assert x.requires_grad == (phase == "train") == (upstream is not None)
        if phase == "train":
            x.register_hook(gradients.append)
        before = x.detach().clone()
        step()
        added.append(x.detach() - before)
    assert torch.allclose(*added, atol=1e-5) == (phase == "frozen")
    assert len(gradients) == (2 if phase == "train" else 0)
    assert all(gradient.any() for gradient in gradients)
