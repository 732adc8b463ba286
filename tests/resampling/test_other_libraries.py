"""The recipes of docs/other-libraries.md, as they are printed there, against the loops that they replace."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from oracles import relative

PAGE = (Path(__file__).parents[2] / "docs" / "other-libraries.md").read_text()
RECIPES = {"torch": torch}
for block in re.findall(r"```python\n(.*?)```", PAGE.split("## Recipes")[1], re.S):
    exec(block, RECIPES)

TABLE = torch.randn(8, 8, 6, generator=torch.Generator().manual_seed(0))
FLAT = [(4, 6), (10, 2), (8, 8), (4, 6), (12, 14)]
FRAMES = [(1, 4, 6), (3, 10, 2), (2, 8, 8), (1, 4, 6)]


def resized(table, h, w, **how):
    """One image's cells (h, w, C), by PyTorch."""
    return F.interpolate(table.permute(2, 0, 1)[None], size=(h, w), align_corners=False, **how)[0].permute(1, 2, 0)


def packed_loop(table, sizes):
    """vLLM and SGLang: image after image, bilinear with antialiasing, one behind the other."""
    return torch.cat([resized(table, h, w, mode="bilinear", antialias=True).flatten(0, 1) for h, w in sizes])


def torchtitan_loop(table, sizes, length):
    """torchtitan: the same, padded; images of size 0 are skipped. Rows that it leaves uninitialised are NaN here."""
    out = torch.full((len(sizes), length, table.shape[-1]), torch.nan)
    for image, (h, w) in enumerate(sizes):
        if h + w:
            out[image, : h * w] = resized(table, h, w, mode="bilinear", antialias=True).flatten(0, 1)
    return out


def moonvit_loop(table, sizes):
    """Kimi-VL: bicubic; an image of the table's own size gets the table itself."""
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


@pytest.mark.parametrize("as_tensor", [True, False])
def test_siglip2_packed(as_tensor):
    sizes = torch.tensor(FLAT) if as_tensor else FLAT
    compare(lambda t: RECIPES["siglip2_packed"](t, sizes, [h * w for h, w in FLAT]), lambda t: packed_loop(t, FLAT))


def test_torchtitan():
    sizes = [*FLAT, (0, 0)]
    got = compare(
        lambda t: RECIPES["torchtitan"](t, torch.tensor(sizes), 200), lambda t: torchtitan_loop(t, sizes, 200)
    )
    assert got.isfinite().all() and (got[0, 24:] == 0).all()


def test_moonvit():
    x = torch.randn(sum(h * w for h, w in FLAT), 6)
    compare(lambda t: RECIPES["moonvit"](x, t, torch.tensor(FLAT)), lambda t: x + moonvit_loop(t, FLAT))


def test_moonvit_frames():
    x, time = torch.randn(sum(t * h * w for t, h, w in FRAMES), 6), torch.randn(4, 1, 6)
    compare(
        lambda t: RECIPES["moonvit_frames"](x, t, time, torch.tensor(FRAMES)),
        lambda t: x + moonvit_frames_loop(t, time, FRAMES),
    )


@pytest.mark.parametrize("stride", [1, 2])
def test_ovis(stride):
    compare(lambda t: RECIPES["ovis"](t, torch.tensor(FRAMES), stride), lambda t: ovis_loop(t, FRAMES, stride))


def test_every_recipe_is_tested():
    recipes = {name for name, what in RECIPES.items() if getattr(what, "__code__", None)} - {"resample_pos_embeds"}
    assert recipes == {"siglip2_packed", "torchtitan", "moonvit", "moonvit_frames", "ovis"}


def test_width_one_of_their_layout_is_wrong_and_ours_is_right():
    rows = resized(TABLE.double(), 6, 8, mode="bilinear", antialias=True)
    right = resized(rows.transpose(0, 1), 1, 6, mode="bilinear", antialias=True)[0]  # the columns as rows: no width 1
    theirs, ours = packed_loop(TABLE, [(6, 1)]), RECIPES["siglip2_packed"](TABLE, [(6, 1)], [6])
    assert relative(ours, right) <= 1e-6 and relative(theirs, right) > 1e-2
