"""A timed step is what it says: forward and backward of the position embedding alone, with timm's
result."""

from contextlib import ExitStack
from itertools import cycle, repeat

import pytest
import torch

from tests.support.oracles import STOCK
from tests.support.running import ran
from timm_naflex_fast import status
from timm_naflex_fast.measure.bench import pos_embed
from timm_naflex_fast.measure.bench.race import PLAIN_ADD
from timm_naflex_fast.measure.bench.workloads import WORKLOADS, coordinates
from timm_naflex_fast.measure.contenders import LEARNED, use
from timm_naflex_fast.names import STRATEGY_NAMES

CONTENDERS = pos_embed.DEFAULTS["contenders"]


@pytest.fixture
def small():
    """Makes races on a small batch; what they switched on stays on until the test ends."""
    with ExitStack() as stack:
        yield lambda phase, dtype, *names: pos_embed.race(
            WORKLOADS["diverse"], 3, dtype, phase, names, stack, "cpu", 4
        )


@pytest.mark.parametrize(
    "name", ["stock", "timm-flag-bilinear", "interpolate_cached", "grid_sample", "matmul"]
)
def test_a_training_steps_result_and_gradient_are_timms(name):
    coord, embeds, reference = (
        coordinates([(5, 7), (4, 4), (9, 31)]),
        *(WORKLOADS["diverse"].embeds(4) for _ in "ab"),
    )
    x, g = torch.randn(2, *coord.shape[:2], 4)
    values, want = torch.randn(2, 1, 32, 32, 4), x.clone()
    method = STOCK[LEARNED + "_grid_sample" * (name in ("timm-flag-bilinear", "grid_sample"))]
    if name == "timm-flag-bilinear":
        reference.pos_embed_interp_mode = "bilinear"
    with ran(*{name} & set(STRATEGY_NAMES)), use(name, embeds):
        contender = pos_embed.timed(name, embeds, repeat(coord), x, g, cycle(values))
        for value in values:
            given = contender.prepare()
            assert given[0].data_ptr() == x.data_ptr() and embeds.pos_embed.grad is None
            contender.run(given)
            assert torch.equal(embeds.pos_embed.detach(), value)
            reference.pos_embed.data.copy_(value)
            reference.pos_embed.grad = None
            want = want.detach().requires_grad_().clone()
            method(reference, want, coord)
            want.backward(g)
    torch.testing.assert_close(x, want.detach(), atol=2e-5, rtol=0)
    torch.testing.assert_close(
        embeds.pos_embed.grad, reference.pos_embed.grad, atol=1e-4, rtol=1e-5
    )


@ran("matmul")
@pytest.mark.parametrize("phase", ["infer", "frozen", "train"])
def test_the_table_changes_but_for_frozen_and_only_train_goes_backward(phase, small):
    (contender,) = small(phase, "float32", "matmul").contenders
    steps, seen = [], []
    for _ in range(2):
        x, coord = contender.prepare()
        assert x.requires_grad == (phase == "train")
        if phase == "train":
            x.register_hook(seen.append)
        before = x.detach().clone()
        contender.run((x, coord))
        steps.append(x.detach() - before)
    assert torch.allclose(*steps, atol=1e-5) == (phase == "frozen")
    assert len(seen) == 2 * (phase == "train") and all(grad.any() for grad in seen)


def test_every_contender_has_the_same_x_and_its_own_choice(small):
    found = small("infer", "bfloat16", *CONTENDERS)
    assert [c.name for c in found.contenders] == CONTENDERS
    assert {flags.pos_embed for flags in status().models} == {"stock", *STRATEGY_NAMES}
    *others, plain = found.contenders
    x, *xs = [c.prepare()[0] for c in others]
    assert all(other is x for other in xs) and x.dtype == torch.bfloat16 and plain.name == PLAIN_ADD
    assert found.about["tokens"] == sum(h * w for h, w in WORKLOADS["diverse"].grids(3))
    before = x.clone()
    plain.run(plain.prepare())
    assert (x != before).float().mean() > 0.99  # but for what bfloat16 rounds away
