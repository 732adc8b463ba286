"""Whole models of both libraries under each mode, and what stands around a model in training: timm's
and transformers' own results."""

from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.checks import during
from tests.support.oracles import (
    NEW_TIMM,
    OLD_TORCH,
    first,
    relative,
    small_vit,
    trained,
    worst,
)
from tests.support.running import running
from tests.support.whole_models import IMAGES, NAFLEXVITS, NAMES, RUNS, batch_of, build
from timm_naflex_fast import enable, status

EXACT = ["matmul", "interpolate_cached"]


def as_numpy(tensor):
    return tensor.detach().numpy().copy() if tensor.dtype.is_floating_point else tensor


def functional(model):
    doubles = {name: parameter * 1 for name, parameter in model.named_parameters()}
    return partial(functional_call, model, doubles)


def grad_checkpointing(model):
    model.set_grad_checkpointing()
    return model


def itself(model):
    return model


# What is made of a model, and in which context it runs.
UNDER = {
    "nothing": (itself, nullcontext),
    "grad_checkpointing": (grad_checkpointing, nullcontext),
    "functional_call": (functional, nullcontext),
    "saved_tensors_hooks": (
        itself,
        partial(torch.autograd.graph.saved_tensors_hooks, as_numpy, torch.as_tensor),
    ),
    "deterministic algorithms": (
        itself,
        partial(during, torch.use_deterministic_algorithms, True, after=False),
    ),
    "autocast": (itself, partial(torch.autocast, "cpu", torch.bfloat16)),
}
WITH_IMAGES = [f"{name}, images" for name in NAFLEXVITS]
TRAINED = [*product([*NAMES, *WITH_IMAGES], EXACT, ["nothing"])]
TRAINED += product(["learned", "factorized", "siglip2"], ["matmul"], [*UNDER][1:-1])
TRAINED += product(RUNS, ["matmul"], ["nothing", "grad_checkpointing"])
# Older timm writes float32 tables into bfloat16, and fails. On torch 2.4 its own result is NaN.
if NEW_TIMM and not OLD_TORCH:
    TRAINED += product(RUNS, ["matmul"], ["autocast"])


@pytest.mark.parametrize(("name", "mode", "under"), TRAINED)
def test_trains_like_the_library(name, mode, under):
    name, *images = name.split(", ")
    is_rope = name in RUNS
    # Patch dropout moves coordinates, and prefix tokens have none.
    dropped = dict(patch_drop_rate=0.4, class_token=True, reg_tokens=2) if is_rope else {}
    model = build(name, **dropped).train(is_rope)
    batch = IMAGES[0] if images else batch_of(name, times=4)
    change, context = UNDER[under]

    def step():
        torch.manual_seed(0)
        run = change(model)
        with context():
            return trained(model, batch, lambda batch: run(batch).float())

    with running("stock", model=model):
        want, want_grads = step()
    with running(mode, model=model, component="rope" if is_rope else "pos_embed"):
        got, grads = step()
        again, again_grads = step()

    assert relative(got, want) <= 1e-5
    assert worst(grads, want_grads) <= (2e-2 if under == "autocast" else 1e-5)
    assert torch.equal(again, got)
    assert worst(again_grads, grads) == 0


@pytest.mark.parametrize("mode", EXACT)
@pytest.mark.parametrize("kind", ["learned", "factorized"])
def test_images_of_another_number_of_tokens_are_refused_unchanged(kind, mode):
    embeds = build(kind).embeds
    for tokens in (1, 5, 7):
        x = torch.zeros(2, tokens, embeds.embed_dim)
        for chosen in ("stock", mode):
            error = pytest.raises(RuntimeError, match=r"size of tensor a|the broadcast shape")
            with enable(chosen), error:
                getattr(embeds, f"_apply_{kind}_pos_embed")(x, (2, 3))
        assert not x.any()
    with running(mode):
        getattr(embeds, f"_apply_{kind}_pos_embed")(torch.zeros(2, 6, embeds.embed_dim), (2, 3))


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize("mode", EXACT)
def test_fake_tensors_work_and_poison_nothing(mode):
    embeds = small_vit().embeds.requires_grad_(False)
    image = torch.randn(2, 1, 24, 28)

    def tokens(image):
        return first(embeds(image))

    want = tokens(image)

    enable(mode)
    for _ in range(2):
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            assert tokens(fake.from_tensor(image)).shape == want.shape
        graph = make_fx(tokens, tracing_mode="fake", _allow_non_fake_inputs=True)(image)
        for run in (graph, tokens):
            torch.testing.assert_close(run(image), want, atol=2e-6, rtol=0)
    assert set(status().calls) == {("pos_embed", mode)}
