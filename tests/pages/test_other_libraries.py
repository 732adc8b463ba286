"""The recipes of docs/other-libraries.md, as printed there, against the loops that they replace."""

import os
import re
import sys
from pathlib import Path
from types import FunctionType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.support.checks import one_by_one
from tests.support.oracles import relative

PAGE = (Path(__file__).parents[2] / "docs" / "other-libraries.md").read_text()
CODE = r"```python\n(.*?)```"
RECIPES = {}
printed = PAGE.split("## Recipes")[1].split("### In every")[0]
for block in re.findall(CODE, printed, re.S):
    exec(block, RECIPES)  # with no names but those that the page imports

TABLE = torch.randn(8, 8, 6, generator=torch.Generator().manual_seed(0))
TIME = torch.randn(4, 1, 6, generator=torch.Generator().manual_seed(1))
FLAT = [(4, 6), (10, 2), (8, 8), (4, 6), (6, 1), (12, 14)]
FRAMES = [(1, 4, 6), (3, 10, 2), (2, 8, 8), (1, 4, 6)]
SMOOTH = dict(mode="bilinear", antialias=True)
CUBIC = dict(mode="bicubic")
CASES = [
    ("siglip2_packed", FLAT, SMOOTH),  # vLLM and SGLang
    ("isaac", FLAT, SMOOTH),
    ("isaac", torch.tensor(FLAT), SMOOTH),
    ("moonvit", FLAT, CUBIC),  # Kimi-VL
    ("kimi_k25", FRAMES, CUBIC | {"time": TIME}),
    ("kimi_k25", torch.tensor(FRAMES), CUBIC | {"time": TIME}),
    ("ovis", FRAMES, CUBIC),  # Ovis2.5
    ("ovis", FRAMES, CUBIC | {"merge": 2}),  # the cells of each frame block after block
]


def loop(table, sizes, mode, antialias=False, merge=1, time=None):
    """Image after image by PyTorch, one behind the other.

    Each frame of a video adds its row of ``time``.
    """
    images = one_by_one(table, sizes, mode=mode, antialias=antialias, merge=merge)
    if time is not None:
        for i, (t, h, w) in enumerate(sizes):
            if t > 1:
                by_frame = time[:t, 0].double()  # (t, C)
                images[i] = images[i] + by_frame.repeat_interleave(h * w, 0)
    return torch.cat(images)


def call(recipe, table, sizes, merge=1):
    """A recipe's result, called as its library calls it."""
    if recipe == "siglip2_packed":  # entries without tokens add none
        sizes = torch.tensor([*sizes, (0, 0)])
        return RECIPES[recipe](table, sizes, sizes.prod(1).tolist())
    if recipe == "ovis":
        return RECIPES[recipe](table, torch.tensor(sizes), merge)
    module = SimpleNamespace(
        weight=table,
        time_weight=TIME,
        position_embedding=SimpleNamespace(weight=table.flatten(0, 1)),
        position_embedding_size=len(table),
        interpolation_mode="bicubic",
    )
    if recipe == "isaac":
        return RECIPES[recipe](module, (0, 0, sizes))
    return RECIPES[recipe](module, sizes)


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
    functions = {name for name, what in RECIPES.items() if isinstance(what, FunctionType)}
    assert functions - {"resample_pos_embeds"} == {recipe for recipe, *_ in CASES}


def test_no_images():
    assert call("moonvit", TABLE, []).shape == (0, 6)


def test_an_image_adds_no_time():
    """Which does not widen it to the time's dtype either."""
    got = call("kimi_k25", TABLE.bfloat16(), [(1, 4, 6), (1, 10, 2)])
    want = loop(TABLE, FLAT[:2], "bicubic")
    assert got.dtype == torch.bfloat16
    assert torch.allclose(got.double(), want, atol=0.03)


VLLM = "vllm.model_executor.models.lfm2_siglip2"
SGLANG = "sglang.srt.plugins.hook_registry"


def entry_point(server):
    """The function of the page that puts a recipe on in a server."""
    (block,) = [code for code in re.findall(CODE, PAGE, re.S) if f"def {server}()" in code]
    names = dict(RECIPES)
    exec(block, names)
    return names[server]


@pytest.fixture
def stand_in(monkeypatch):
    """Makes a module that is not installed, and the packages above it."""

    def make(path, **contents):
        module = Mock(**contents)
        while path:
            monkeypatch.setitem(sys.modules, path, module)
            path = path.rpartition(".")[0]
        return module

    return make


def test_vllms_entry_point_puts_a_recipe_on(stand_in, capsys):
    embeddings = type("Embeddings", (), {})
    stand_in(VLLM, Siglip2VisionEmbeddings=embeddings)
    entry_point("vllm")()
    got = embeddings().resize_positional_embeddings_packed(TABLE, torch.tensor([(2, 3)]), [6])
    assert got.shape == (6, 6)
    assert f"process {os.getpid()}" in capsys.readouterr().out


def test_sglangs_entry_point_puts_a_recipe_on(stand_in):
    registry = Mock()
    module = stand_in(SGLANG, HookRegistry=registry)
    entry_point("sglang")()
    ((target, function, kind), _) = registry.register.call_args
    assert function is RECIPES["siglip2_packed"]
    assert kind is module.HookType.REPLACE
    assert target.startswith("sglang.srt.models.")
