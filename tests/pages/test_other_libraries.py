"""The recipes of docs/other-libraries.md, as they are printed there, against the loops that they
replace."""

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.support.checks import one_by_one
from tests.support.oracles import relative

PAGE = (Path(__file__).parents[2] / "docs" / "other-libraries.md").read_text()
RECIPES = {}
for block in re.findall(
    r"```python\n(.*?)```", PAGE.split("## Recipes")[1].split("### In every")[0], re.S
):
    exec(block, RECIPES)  # with no names but those that the page imports

TABLE = torch.randn(8, 8, 6, generator=torch.Generator().manual_seed(0))
TIME = torch.randn(4, 1, 6, generator=torch.Generator().manual_seed(1))
FLAT = [(4, 6), (10, 2), (8, 8), (4, 6), (6, 1), (12, 14)]
FRAMES = [(1, 4, 6), (3, 10, 2), (2, 8, 8), (1, 4, 6)]
SMOOTH, CUBIC = dict(mode="bilinear", antialias=True), dict(mode="bicubic")
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
    """Image after image by PyTorch, one behind the other; each frame of a video adds its row of
    ``time``."""
    found = one_by_one(table, sizes, mode=mode, antialias=antialias, merge=merge)
    for i, size in enumerate(sizes):
        if time is not None and size[0] > 1:
            found[i] = found[i] + time[: size[0], 0].double().repeat_interleave(
                len(found[i]) // size[0], 0
            )
    return torch.cat(found)


def call(recipe, table, sizes, merge=1):
    """A recipe's result, called as its library calls it."""
    if recipe == "siglip2_packed":  # entries without tokens add none
        sizes = torch.tensor([*sizes, (0, 0)])
        return RECIPES[recipe](table, sizes, sizes.prod(1).tolist())
    if recipe == "ovis":
        return RECIPES[recipe](table, torch.tensor(sizes), merge)
    cells = SimpleNamespace(weight=table.flatten(0, 1))
    own = dict(
        weight=table, time_weight=TIME, position_embedding=cells, position_embedding_size=len(table)
    )
    module = SimpleNamespace(**own, interpolation_mode="bicubic")
    return RECIPES[recipe](module, (0, 0, sizes) if recipe == "isaac" else sizes)


@pytest.mark.parametrize(("recipe", "sizes", "how"), CASES)
def test_a_recipe_is_the_loop_that_it_replaces(recipe, sizes, how):
    """Values and gradients."""
    table = TABLE.clone().requires_grad_()
    got = call(recipe, table, sizes, how.get("merge", 1))
    want = loop(table, torch.as_tensor(sizes).tolist(), **how)
    assert got.shape == want.shape and (got - want).abs().max() <= 2e-6 * TABLE.abs().max()
    weight = torch.randn(want.shape)
    assert (
        relative(*(torch.autograd.grad((out * weight).sum(), table)[0] for out in (got, want)))
        <= 1e-5
    )


def test_no_images_and_images_without_frames_and_no_recipe_forgotten():
    """An image adds no time, which does not widen it to the time's dtype either."""
    recipes = {name for name, what in RECIPES.items() if getattr(what, "__code__", None)} - {
        "resample_pos_embeds"
    }
    assert recipes == {recipe for recipe, *_ in CASES} and call("moonvit", TABLE, []).shape == (
        0,
        6,
    )
    got = call("kimi_k25", TABLE.bfloat16(), [(1, 4, 6), (1, 10, 2)])
    assert got.dtype == torch.bfloat16 and torch.allclose(
        got.double(), loop(TABLE, FLAT[:2], "bicubic"), atol=0.03
    )


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_a_servers_own_entry_point_puts_a_recipe_on(server, monkeypatch, capsys):
    """With stand-ins for the modules that the page names."""
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", PAGE, re.S) if f"def {server}()" in b)
    names, put, embeddings = dict(RECIPES), Mock(), type("Embeddings", (), {})
    exec(block, names)
    vllm, sglang = "vllm.model_executor.models.lfm2_siglip2", "sglang.srt.plugins.hook_registry"
    paths = [path.rsplit(".", n)[0] for path in (vllm, sglang) for n in range(4)]
    for path in paths:
        monkeypatch.setitem(
            sys.modules, path, Mock(Siglip2VisionEmbeddings=embeddings, HookRegistry=put)
        )
    names[server]()
    if server == "vllm":
        assert embeddings().resize_positional_embeddings_packed(
            TABLE, torch.tensor([(2, 3)]), [6]
        ).shape == (6, 6)
        assert f"process {os.getpid()}" in capsys.readouterr().out
    else:
        ((target, function, kind), _) = put.register.call_args
        assert (
            function is RECIPES["siglip2_packed"] and kind is sys.modules[sglang].HookType.REPLACE
        )
        assert target.startswith("sglang.srt.models.")
