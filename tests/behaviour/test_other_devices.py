"""On a device that is neither a CPU nor CUDA: no float64, no ``embedding_bag``, and timm's result.

The device is a pretended one (tests/support/second_device.py), which refuses what Metal refuses.
"""

from functools import partial

import pytest
import torch

from tests.support.moved import (
    COORD,
    SIZES,
    embeds,
    factorized,
    learned,
    patch_kernel,
    random,
    rope,
)
from tests.support.oracles import small_vit
from tests.support.rotary import CLASSES
from tests.support.running import running
from tests.support.second_device import SecondDevice, moved, waits
from timm_naflex_fast import enable, status
from timm_naflex_fast.names import STRATEGY_NAMES

pytestmark = pytest.mark.usefixtures("clean")


@pytest.fixture
def check(monkeypatch):
    """A function that compares a case, a function of a mover of tensors, on the CPU and on the
    device.

    The first of a case's results is an output, the others are gradients.
    """

    def compare(case, forward=2e-6, gradients=1e-5):
        want = case(lambda tensor: tensor)
        with SecondDevice(monkeypatch, "mps"):
            got = case(lambda tensor: tensor.to("mps:0", non_blocking=True))
        got = [tensor.held for tensor in got]
        largest = max(1.0, want[0].abs().max().item())
        assert (got[0] - want[0]).abs().max() <= forward * largest
        for ours, theirs in zip(got[1:], want[1:], strict=True):
            assert (ours - theirs).abs().max() <= gradients * theirs.abs().max().clamp(min=1e-3)
        return want

    return compare


LEARNED = [
    dict(mode="bilinear"),
    dict(mode="bicubic"),
    dict(mode="bicubic", ar_preserving=True),
    dict(mode="bilinear", antialias=False, align_corners=True),
]


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
def test_tables_and_their_gradients(check, strategy):
    for options in LEARNED:
        # Without the second derivative: at width 1 that of F.interpolate itself is wrong.
        case = partial(learned, strategy=strategy, **options)
        check(lambda to, case=case: case(to)[:-1])
        assert not waits
    check(partial(factorized, strategy=strategy), forward=4e-6)


def test_embeddings_by_sizes_patch_kernels_and_rotary_embeddings(check):
    for strategy in ("matmul", "interpolate_cached"):
        for options in ({"move_sizes": True}, {"length": 40, "padding": "first"}, {"merge": 2}):
            check(partial(embeds, strategy=strategy, **options))
    for size in ((9, 14), (20, 20), (32, 12)):
        check(partial(patch_kernel, size=size), forward=1e-5)
    for kind in CLASSES:
        check(partial(rope, kind=kind))


@pytest.mark.parametrize("method", ["naflex_pos_embed", "pos_embed"])
@pytest.mark.parametrize("kind", ["learned", "factorized"])
@pytest.mark.parametrize("mode", STRATEGY_NAMES)
def test_timms_embeddings_are_trained_three_steps(check, mode, kind, method):
    if mode == "grid_sample" and method == "pos_embed":
        pytest.skip("plain images are computed by matmul")

    def train(to):
        module = moved(small_vit(depth=0, pos_embed=kind).embeds, to)
        tables = [table for name, table in module.named_parameters() if "pos_embed" in name]
        where = to(COORD) if method == "naflex_pos_embed" else (1, 31)
        x = to(random(6, 31, 32, seed=1))
        optimizer = torch.optim.SGD(tables, 10.0, foreach=False)
        outs = []
        with running(mode):
            for _ in range(3):
                out = x * 1
                getattr(module, f"_apply_{kind}_{method}")(out, where)
                outs.append(out.detach())
                optimizer.zero_grad()
                out.square().mean().backward()
                optimizer.step()
        return [torch.stack(outs)]

    (want,) = check(train, forward=1e-5)

    assert not torch.equal(want[0], want[2])  # the steps change the tables


@pytest.mark.filterwarnings("ignore:timm_naflex_fast")
def test_where_an_operator_is_missing_timms_own_code_runs_and_status_says_why(monkeypatch):
    def add(to):
        x = to(torch.zeros(6, 31, 32))
        module = moved(small_vit(depth=0).embeds, to)
        module._apply_learned_naflex_pos_embed(x, to(COORD))
        return x.detach()

    want = add(lambda tensor: tensor)

    enable()
    with SecondDevice(monkeypatch, "mps", lacking=[torch.ops.aten.mm]):
        got = add(lambda tensor: tensor.to("mps:0"))

    assert torch.equal(got.held, want)
    assert dict(status().fallbacks) == {"a device (mps) without aten.mm": 1}
    assert status().calls == {("pos_embed", "stock"): 1}


def test_transformers_siglip2(check):
    pytest.importorskip("transformers")
    from transformers import Siglip2VisionConfig
    from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionEmbeddings

    def embed(to):
        torch.manual_seed(0)
        config = Siglip2VisionConfig(hidden_size=16, num_attention_heads=2, num_patches=36)
        module = moved(Siglip2VisionEmbeddings(config), to)
        with running("matmul", library="transformers"):
            out = module(to(random(6, 31, 768)), torch.tensor(SIZES))
        weight = module.position_embedding.weight
        return [out.detach(), *torch.autograd.grad(out.square().sum(), weight)]

    check(embed)
