"""The recipes of docs/other-libraries.md, as they are printed there, against the loops that they replace."""

import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.support.checks import one_by_one
from tests.support.oracles import relative

PAGE = (Path(__file__).parents[2] / "docs" / "other-libraries.md").read_text()
RECIPES = {}
for block in re.findall(r"```python\n(.*?)```", PAGE.split("## Recipes")[1].split("### In every")[0], re.S):
    exec(block, RECIPES)  # with no names but those that the page imports

TABLE = torch.randn(8, 8, 6, generator=torch.Generator().manual_seed(0))
FLAT = [(4, 6), (10, 2), (8, 8), (4, 6), (6, 1), (12, 14)]
FRAMES = [(1, 4, 6), (3, 10, 2), (2, 8, 8), (1, 4, 6)]


def loop(table, sizes, mode, antialias=False, merge=1, time=None):
    """Image after image by PyTorch, one behind the other; each frame of a video adds its row of ``time``."""
    found = one_by_one(table, sizes, mode=mode, antialias=antialias, merge=merge)
    for i, size in enumerate(sizes):
        if time is not None and size[0] > 1:
            found[i] = found[i] + time[: size[0], 0].double().repeat_interleave(len(found[i]) // size[0], 0)
    return torch.cat(found)


def compare(recipe, sizes, mode, **how):
    """Values and gradients of a recipe, a function of the table."""
    table = TABLE.clone().requires_grad_()
    got, want = recipe(table), loop(table, sizes, mode, **how)
    assert got.shape == want.shape and (got - want).abs().max() <= 2e-6 * TABLE.abs().max()
    weight = torch.randn(want.shape)
    assert relative(*(torch.autograd.grad((out * weight).sum(), table)[0] for out in (got, want))) <= 1e-5


def test_siglip2_packed():
    """vLLM and SGLang. Entries without tokens add none."""
    sizes = torch.tensor([*FLAT, (0, 0)])
    recipe = lambda table: RECIPES["siglip2_packed"](table, sizes, sizes.prod(1).tolist())
    compare(recipe, FLAT, "bilinear", antialias=True)


@pytest.mark.parametrize("sizes", [FLAT, torch.tensor(FLAT)], ids=["list", "tensor"])
def test_isaac(sizes):
    def recipe(table):
        weight = SimpleNamespace(weight=table.flatten(0, 1))
        return RECIPES["isaac"](SimpleNamespace(position_embedding=weight, position_embedding_size=8), (0, 0, sizes))

    compare(recipe, FLAT, "bilinear", antialias=True)


def test_moonvit():
    """Kimi-VL."""

    def recipe(table, sizes=FLAT):
        return RECIPES["moonvit"](SimpleNamespace(weight=table, interpolation_mode="bicubic"), sizes)

    compare(recipe, FLAT, "bicubic")
    assert recipe(TABLE, []).shape == (0, 6)


@pytest.mark.parametrize("sizes", [FRAMES, torch.tensor(FRAMES)], ids=["list", "tensor"])
def test_kimi_k25(sizes):
    """An image adds no time, which does not widen it to the time's dtype either."""
    time = torch.randn(4, 1, 6)

    def recipe(table, sizes=sizes):
        embeddings = SimpleNamespace(weight=table, time_weight=time, interpolation_mode="bicubic")
        return RECIPES["kimi_k25"](embeddings, sizes)

    compare(recipe, FRAMES, "bicubic", time=time)
    got, images = recipe(TABLE.bfloat16(), [(1, 4, 6), (1, 10, 2)]), loop(TABLE, FLAT[:2], "bicubic")
    assert got.dtype == torch.bfloat16 and torch.allclose(got.double(), images, atol=0.03)


@pytest.mark.parametrize("stride", [1, 2])
def test_ovis(stride):
    """Ovis2.5: the cells of each frame block after block."""
    recipe = lambda table: RECIPES["ovis"](table, torch.tensor(FRAMES), stride)
    compare(recipe, FRAMES, "bicubic", merge=stride)


def test_every_recipe_is_tested():
    recipes = {name for name, what in RECIPES.items() if getattr(what, "__code__", None)} - {"resample_pos_embeds"}
    assert recipes == {"siglip2_packed", "isaac", "moonvit", "kimi_k25", "ovis"}


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_a_servers_own_entry_point_puts_a_recipe_on(server, monkeypatch, capsys):
    """With stand-ins for the modules that the page names."""
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", PAGE, re.S) if f"def {server}()" in b)
    names = dict(RECIPES)
    exec(block, names)
    registered = []
    stand_ins = {
        "vllm.model_executor.models.lfm2_siglip2": {"Siglip2VisionEmbeddings": type("Embeddings", (), {})},
        "sglang.srt.plugins.hook_registry": {
            "HookRegistry": SimpleNamespace(register=lambda *args: registered.append(args)),
            "HookType": SimpleNamespace(REPLACE="replace"),
        },
    }
    for path, contents in stand_ins.items():
        parts = path.split(".")
        for name in (".".join(parts[: n + 1]) for n in range(len(parts))):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[path]).update(contents)
    names[server]()
    if server == "vllm":
        embeddings = stand_ins["vllm.model_executor.models.lfm2_siglip2"]["Siglip2VisionEmbeddings"]()
        assert embeddings.resize_positional_embeddings_packed(TABLE, torch.tensor([(2, 3)]), [6]).shape == (6, 6)
        assert f"process {os.getpid()}" in capsys.readouterr().out
    else:
        ((target, function, kind),) = registered
        assert function is RECIPES["siglip2_packed"] and kind == "replace" and target.startswith("sglang.srt.models.")
