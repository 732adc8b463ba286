"""The recipes of docs/other-libraries.md, as they are printed there, against the loops that they replace."""

import os
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.support.oracles import relative

PAGE = (Path(__file__).parents[2] / "docs" / "other-libraries.md").read_text()
RECIPES = {}
for block in re.findall(r"```python\n(.*?)```", PAGE.split("## Recipes")[1].split("### In every")[0], re.S):
    exec(block, RECIPES)  # with no names but those that the page imports

TABLE = torch.randn(8, 8, 6, generator=torch.Generator().manual_seed(0))
FLAT = [(4, 6), (10, 2), (8, 8), (4, 6), (12, 14)]
FRAMES = [(1, 4, 6), (3, 10, 2), (2, 8, 8), (1, 4, 6)]


def resized(table, h, w, **how):
    """One image's cells (h, w, C), by PyTorch."""
    return F.interpolate(table.permute(2, 0, 1)[None], size=(h, w), align_corners=False, **how)[0].permute(1, 2, 0)


def packed_loop(table, sizes):
    """vLLM and SGLang: image after image, bilinear with antialiasing, one behind the other."""
    return torch.cat([resized(table, h, w, mode="bilinear", antialias=True).flatten(0, 1) for h, w in sizes])


def moonvit_loop(table, sizes):
    """Kimi-VL, Kimi-K2.5: bicubic; an image of the table's own size gets the table itself."""
    own = tuple(table.shape[:2])
    return torch.cat([(table if s == own else resized(table, *s, mode="bicubic")).flatten(0, 1) for s in sizes])


def moonvit_frames_loop(table, time, sizes):
    """Kimi-K2.5: each frame of a video adds its row of ``time``; an image adds none."""
    found = []
    for t, h, w in sizes:
        cells = moonvit_loop(table, [(h, w)])
        found += [cells] if t == 1 else [cells + time[frame] for frame in range(t)]
    return torch.cat(found)


def ovis_loop(table, sizes, stride):
    """Ovis2.5: bicubic; the cells of each frame block after block."""
    found = []
    for t, h, w in sizes:
        cells = resized(table, h, w, mode="bicubic")
        blocks = [
            cells[y : y + stride, x : x + stride].flatten(0, 1)
            for y in range(0, h, stride)
            for x in range(0, w, stride)
        ]
        found += [torch.cat(blocks)] * t
    return torch.cat(found)


def compare(recipe, loop):
    """Values where the loop has any, and gradients."""
    table = TABLE.clone().requires_grad_()
    got, want = recipe(table), loop(table)
    known = ~want.isnan()
    assert got.shape == want.shape and (got - want)[known].abs().max() <= 2e-6 * TABLE.abs().max()
    weight = torch.randn(want.shape)[known]
    grads = [torch.autograd.grad((out[known] * weight).sum(), table)[0] for out in (got, want)]
    assert relative(*grads) <= 1e-5
    return got


def test_siglip2_packed():
    """Entries without tokens add none."""
    sizes = torch.tensor([*FLAT, (0, 0)])
    compare(lambda t: RECIPES["siglip2_packed"](t, sizes, sizes.prod(1).tolist()), lambda t: packed_loop(t, FLAT))


@pytest.mark.parametrize("as_tensor", [True, False])
def test_isaac(as_tensor):
    sizes = torch.tensor(FLAT) if as_tensor else FLAT

    def recipe(table):
        weight = SimpleNamespace(weight=table.flatten(0, 1))
        return RECIPES["isaac"](SimpleNamespace(position_embedding=weight, position_embedding_size=8), (0, 0, sizes))

    compare(recipe, lambda t: packed_loop(t, FLAT))


def test_moonvit():
    compare(
        lambda t: RECIPES["moonvit"](SimpleNamespace(weight=t, interpolation_mode="bicubic"), FLAT),
        lambda t: moonvit_loop(t, FLAT),
    )
    assert RECIPES["moonvit"](SimpleNamespace(weight=TABLE, interpolation_mode="bicubic"), []).shape == (0, 6)


@pytest.mark.parametrize("as_tensor", [True, False])
def test_kimi_k25(as_tensor):
    time, sizes = torch.randn(4, 1, 6), torch.tensor(FRAMES) if as_tensor else FRAMES
    compare(
        lambda t: RECIPES["kimi_k25"](SimpleNamespace(weight=t, time_weight=time, interpolation_mode="bicubic"), sizes),
        lambda t: moonvit_frames_loop(t, time, FRAMES),
    )


def test_kimi_k25_adds_no_time_to_images():
    """Nor does it widen them to the time's dtype."""
    time = torch.randn(4, 1, 6)
    embeddings = SimpleNamespace(weight=TABLE.bfloat16(), time_weight=time, interpolation_mode="bicubic")
    got = RECIPES["kimi_k25"](embeddings, [(1, 4, 6), (1, 10, 2)])
    assert got.dtype == torch.bfloat16 and torch.allclose(got.float(), moonvit_loop(TABLE, FLAT[:2]), atol=0.03)


@pytest.mark.parametrize("stride", [1, 2])
def test_ovis(stride):
    compare(lambda t: RECIPES["ovis"](t, torch.tensor(FRAMES), stride), lambda t: ovis_loop(t, FRAMES, stride))


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


def test_width_one_of_their_layout_is_wrong_and_ours_is_right():
    rows = resized(TABLE.double(), 6, 8, mode="bilinear", antialias=True)
    right = resized(rows.transpose(0, 1), 1, 6, mode="bilinear", antialias=True)[0]  # the columns as rows: no width 1
    theirs, ours = packed_loop(TABLE, [(6, 1)]), RECIPES["siglip2_packed"](TABLE, torch.tensor([(6, 1)]), [6])
    assert relative(ours, right) <= 1e-6 and relative(theirs, right) > 1e-2
