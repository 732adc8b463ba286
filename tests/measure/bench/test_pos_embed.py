"""A timed step is what it says: forward and backward of the position embedding alone, with timm's result."""

from contextlib import ExitStack
from itertools import cycle

import pytest
import torch

from tests.support.oracles import STOCK, is_pristine
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
    """Makes races on the diverse workload; what they switched on stays on until the test ends."""
    with ExitStack() as on:
        yield lambda phase, *names, dtype="float32", name="diverse", batch=3: pos_embed.race(
            WORKLOADS[name], batch, dtype, phase, names, on, channels=4
        )


GRIDS = [(5, 7), (4, 4), (9, 31)]


@pytest.mark.parametrize("name", ["stock", "timm-flag-bilinear", "interpolate_cached", "grid_sample", "matmul"])
def test_a_training_steps_result_and_gradient_are_timms(name):
    workload, coord = WORKLOADS["diverse"], coordinates(GRIDS)
    embeds, reference = workload.embeds(4), workload.embeds(4)
    x, g = torch.randn(*coord.shape[:2], 4), torch.randn(*coord.shape[:2], 4)
    values = [torch.randn(1, 32, 32, 4) for _ in range(2)]
    want = x.clone()
    method = STOCK[LEARNED + "_grid_sample" * (name in ("timm-flag-bilinear", "grid_sample"))]
    if name == "timm-flag-bilinear":
        reference.pos_embed_interp_mode = "bilinear"
    with ran(*{name} & set(STRATEGY_NAMES)), ExitStack() as on:
        on.enter_context(use(name, embeds))
        contender = pos_embed._timed(name, embeds, coord, x, g, cycle(values))
        for value in values:
            given = contender.prepare()
            assert given.data_ptr() == x.data_ptr() and embeds.pos_embed.grad is None
            contender.run(given)
            assert torch.equal(embeds.pos_embed.detach(), value)
            reference.pos_embed.data.copy_(value)
            reference.pos_embed.grad = None
            want = want.detach().requires_grad_().clone()
            method(reference, want, coord)
            want.backward(g)
    torch.testing.assert_close(x, want.detach(), atol=2e-5, rtol=0)
    torch.testing.assert_close(embeds.pos_embed.grad, reference.pos_embed.grad, atol=1e-4, rtol=1e-5)


@ran("matmul")
def test_a_training_race_goes_backward(small):
    (contender,) = small("train", "matmul").contenders
    given, seen = contender.prepare(), []
    given.register_hook(seen.append)
    contender.run(given)
    assert len(seen) == 1 and seen[0].any()


def test_the_plain_add_touches_x(small):
    plain, stock = small("infer", PLAIN_ADD, "stock").contenders
    x = stock.prepare()
    before = x.clone()
    plain.run(plain.prepare())
    assert bool((x != before).all())


@ran("matmul")
def test_infer_changes_the_table_and_frozen_does_not(small):
    for phase, same in (("infer", False), ("frozen", True)):
        (contender,) = small(phase, "matmul").contenders
        steps = []
        for _ in range(2):
            x = contender.prepare()
            assert not x.requires_grad
            before = x.clone()
            contender.run(x)
            steps.append(x - before)
        assert torch.allclose(*steps, atol=1e-5) is same


def test_every_contender_has_the_same_x_and_its_own_choice():
    with ExitStack() as on:
        found = pos_embed.race(WORKLOADS["siglip"], 2, "bfloat16", "infer", CONTENDERS, on, channels=4)
        assert [c.name for c in found.contenders] == [n for n in CONTENDERS if n not in found.about["left_out"]]
        assert {flags.pos_embed for flags in status().models} == {"stock", *STRATEGY_NAMES}
        xs = [c.prepare() for c in found.contenders if c.name != PLAIN_ADD]
        assert all(x is xs[0] for x in xs) and xs[0].dtype == torch.bfloat16
        grids = WORKLOADS["siglip"].grids(2)
        assert found.about["tokens"] == sum(h * w for h, w in grids)
        assert found.about["x_bytes"] == 2 * max(h * w for h, w in grids) * 4 * 2
    assert is_pristine()
