"""The recipes for other libraries against the loops that they replace."""

import os
import sys
from inspect import getmembers, isfunction
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import recipes
import torch

from tests.support.checks import one_by_one
from tests.support.oracles import relative

TABLE = torch.randn(8, 8, 6, generator=torch.Generator().manual_seed(0))
TIME = torch.randn(4, 1, 6, generator=torch.Generator().manual_seed(1))
FLAT = [(4, 6), (10, 2), (8, 8), (4, 6), (6, 1), (12, 14)]
FRAMES = [(1, 4, 6), (3, 10, 2), (2, 8, 8), (1, 4, 6)]
SMOOTH = dict(mode="bilinear", antialias=True)
CUBIC = dict(mode="bicubic", antialias=False)
ALIGNED = dict(mode="bilinear", antialias=False, align_corners=True)
CASES = [
    (recipes.siglip2_packed, FLAT, SMOOTH),  # vLLM and SGLang
    (recipes.isaac, torch.tensor(FLAT), SMOOTH),
    (recipes.moonvit, FLAT, CUBIC),  # Kimi-VL
    (recipes.kimi_k25, FRAMES, CUBIC | {"time": TIME}),
    (recipes.kimi_k25, torch.tensor(FRAMES), CUBIC | {"time": TIME}),
    (recipes.ovis, FRAMES, CUBIC),  # Ovis2.5
    (recipes.ovis, FRAMES, CUBIC | {"merge": 2}),  # the cells of each frame block after block
    (recipes.qwen3_5, FRAMES, ALIGNED | {"merge": 2}),  # torchtitan
    (recipes.kimi_k2_7, FRAMES, CUBIC | {"time": TIME}),
]


def loop(table, sizes, time=None, **how):
    """Image after image by PyTorch, one behind the other.

    Each frame of a video adds its row of ``time``.
    """
    images = one_by_one(table, sizes, **how)
    if time is not None:
        for i, (t, h, w) in enumerate(sizes):
            if t > 1:
                by_frame = time[:t, 0].double()  # (t, C)
                images[i] = images[i] + by_frame.repeat_interleave(h * w, 0)
    return torch.cat(images)


@pytest.fixture(autouse=True)
def torchtitans_time(monkeypatch):
    """The module from which torchtitan's recipe imports."""
    module = ModuleType("vision_encoder")
    module._get_temporal_pos_embed = lambda t, dim, device: TIME[:t, 0]
    monkeypatch.setitem(sys.modules, "torchtitan.models.kimi_k2_7.vision_encoder", module)


def packed(padded, sizes):
    """Images (B, N, C) one behind the other; what pads them is 0."""
    tokens = torch.tensor([[t * h * w] for t, h, w in sizes])
    real = torch.arange(padded.shape[1]) < tokens
    assert not padded[~real].any()
    return padded[real]


def call(recipe, table, sizes, merge=1):
    """A recipe's result, called as its library calls it."""
    if recipe is recipes.siglip2_packed:  # entries without tokens add none
        sizes = torch.tensor([*sizes, (0, 0)])
        return recipe(table, sizes, sizes.prod(1).tolist())
    if recipe is recipes.ovis:
        return recipe(table, torch.tensor(sizes), merge)
    if recipe is recipes.qwen3_5:
        return packed(recipe(table.flatten(0, 1), sizes, 170, 8, merge, 6), sizes)
    if recipe is recipes.kimi_k2_7:
        return packed(recipe(table, sizes, 170, "bicubic"), sizes)
    module = SimpleNamespace(
        weight=table,
        time_weight=TIME,
        position_embedding=SimpleNamespace(weight=table.flatten(0, 1)),
        position_embedding_size=len(table),
        interpolation_mode="bicubic",
    )
    if recipe is recipes.isaac:
        return recipe(module, (0, 0, sizes))
    return recipe(module, sizes)


@pytest.mark.parametrize(("recipe", "sizes", "how"), CASES)
def test_a_recipe_is_the_loop_that_it_replaces(recipe, sizes, how):
    """Values and gradients."""
    table = TABLE.clone().requires_grad_()
    got = call(recipe, table, sizes, how.get("merge", 1))
    want = loop(table, torch.as_tensor(sizes).tolist(), **how)
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 2e-6 * TABLE.abs().max()

    weight = torch.randn(want.shape)
    (got_grad,) = torch.autograd.grad((got * weight).sum(), table)
    (want_grad,) = torch.autograd.grad((want * weight).sum(), table)
    assert relative(got_grad, want_grad) <= 1e-5


def test_no_recipe_is_forgotten():
    functions = {function for _, function in getmembers(recipes, isfunction)}
    not_recipes = {recipes.resample_pos_embeds, recipes.vllm, recipes.sglang}
    assert functions - not_recipes == {recipe for recipe, *_ in CASES}


@pytest.mark.parametrize("recipe", [recipes.kimi_k25, recipes.kimi_k2_7])
def test_an_image_adds_no_time(recipe):
    """Which does not widen it to the time's dtype either."""
    got = call(recipe, TABLE.bfloat16(), [(1, 4, 6), (1, 10, 2)])
    want = loop(TABLE, FLAT[:2], **CUBIC)
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.double(), want, atol=0.03)


def test_the_entry_points_of_servers_put_a_recipe_on(monkeypatch, capsys):
    module = Mock(Siglip2VisionEmbeddings=type("Embeddings", (), {}))
    for path in ("vllm.model_executor.models.lfm2_siglip2", "sglang.srt.plugins.hook_registry"):
        monkeypatch.setitem(sys.modules, path, module)

    recipes.vllm()
    put_on = module.Siglip2VisionEmbeddings.resize_positional_embeddings_packed
    assert put_on is recipes.siglip2_packed
    assert f"process {os.getpid()}" in capsys.readouterr().out

    recipes.sglang()
    target, *rest = module.HookRegistry.register.call_args.args
    assert target.startswith("sglang.srt.models.")
    assert rest == [recipes.siglip2_packed, module.HookType.REPLACE]
