"""The functions of docs/other-libraries.md for torchtitan, as they are printed there.

The loops that they replace are here in words of our own, under the arguments of torchtitan 0.3.0.
Where that is installed, the first test compares them with its own.
"""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from tests.support.checks import one_by_one
from tests.support.oracles import relative

PAGE = (Path(__file__).parents[2] / "docs" / "other-libraries.md").read_text()
SECTION = PAGE.split("## torchtitan")[1].split("## Recipes")[0]
(BLOCK,) = re.findall(r"```python\n(.*?)```", SECTION, re.S)
RECIPES: dict = {}
exec(BLOCK, RECIPES)  # with no names but those that the page imports

HOMES = {
    "qwen3_5": "torchtitan.models.qwen3_5.vision_encoder",
    "kimi_k2_7": "torchtitan.models.kimi_k2_7.vision_encoder",
}
GRIDS = [[1, 4, 6], [3, 10, 2], [1, 8, 8], [2, 8, 8], [1, 4, 6], [1, 12, 14]]
IMAGES = [[1, h, w] for _, h, w in GRIDS]
LENGTH, DIM = 170, 6
WEIGHT = torch.randn(len(GRIDS), LENGTH, DIM, generator=torch.Generator().manual_seed(2))


def padded(images, length, dtype):
    return torch.stack([F.pad(image, (0, 0, 0, length - len(image))) for image in images]).to(dtype)


def qwens_loop(learned_pos_embed, grids, max_num_patch, side, spatial_merge_size, dim):
    table = learned_pos_embed.view(side, side, dim)
    how = dict(mode="bilinear", antialias=False, align_corners=True, merge=spatial_merge_size)
    return padded(one_by_one(table, grids, **how), max_num_patch, table.dtype)


def time_embed(num_frames, embed_dim, *, base=10000.0, device):
    speed = base ** -(torch.arange(embed_dim // 2, device=device.type) / (embed_dim / 2))
    angle = torch.arange(num_frames, device=device)[:, None] * speed
    return torch.cat((angle.sin(), angle.cos()), 1)


def kimis_loop(pos_embed, grids, max_num_patch, interpolation_mode):
    how = dict(mode=interpolation_mode, antialias=False)
    images = one_by_one(pos_embed, grids, dtype=torch.float32, **how)
    times = []
    for t, h, w in grids:
        frames = time_embed(t, DIM, device=pos_embed.device) * (t > 1)
        times.append(frames.repeat_interleave(h * w, 0))
    dtype = pos_embed.dtype
    return padded(images, max_num_patch, dtype) + padded(times, max_num_patch, dtype)


LOOPS = {"qwen3_5": qwens_loop, "kimi_k2_7": kimis_loop}
recipes = pytest.mark.parametrize("name", LOOPS)


@pytest.fixture(autouse=True)
def time_of_torchtitan(monkeypatch):
    module = ModuleType(HOMES["kimi_k2_7"])
    module._get_temporal_pos_embed = time_embed
    monkeypatch.setitem(sys.modules, HOMES["kimi_k2_7"], module)


def table_of(name, dtype=torch.float32):
    shape = (64, DIM) if name == "qwen3_5" else (8, 8, DIM)
    table = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return table.to(dtype).requires_grad_()


def call(function, name, table, grids=GRIDS, mode="bicubic"):
    return function(table, grids, LENGTH, *((8, 2, DIM) if name == "qwen3_5" else (mode,)))


def result_and_gradient(function, name, *options):
    table = table_of(name)
    out = call(function, name, table, *options)
    return out.detach(), torch.autograd.grad((out * WEIGHT).sum(), table)[0]


@recipes
def test_the_loops_in_our_words_are_those_of_the_installed_release(name, monkeypatch):
    ours = result_and_gradient(LOOPS[name], name)
    monkeypatch.undo()
    pytest.importorskip(HOMES[name], exc_type=ImportError)
    own = importlib.import_module(HOMES[name])._compute_learned_pos_embeds
    assert max(map(relative, ours, result_and_gradient(own, name))) <= 1e-6


@pytest.mark.parametrize("grids", [GRIDS, IMAGES, GRIDS[3:4] * 6], ids=["videos", "images", "one"])
@pytest.mark.parametrize(
    ("name", "mode"), [("qwen3_5", "bilinear"), ("kimi_k2_7", "bicubic"), ("kimi_k2_7", "bilinear")]
)
def test_a_recipe_is_the_loop_that_it_replaces(name, mode, grids):
    """Values, gradients, and one cast from float32."""
    want, want_gradient = result_and_gradient(LOOPS[name], name, grids, mode)
    got, gradient = result_and_gradient(RECIPES[name], name, grids, mode)
    assert got.shape == want.shape and (got - want).abs().max() <= 2e-6 * want.abs().max()
    assert relative(gradient, want_gradient) <= 1e-5

    low = table_of(name, torch.bfloat16)
    want_low = call(LOOPS[name], name, low, grids, mode)
    got_low = call(RECIPES[name], name, low, grids, mode)
    assert got_low.dtype == torch.bfloat16 and relative(got_low, want_low) < 2**-7
    assert (got_low != want_low).float().mean() < 0.01  # ties


@recipes
def test_a_recipe_compiles_without_a_break(name):
    table = table_of(name)
    compiled = torch.compile(
        lambda: call(RECIPES[name], name, table, IMAGES), backend="eager", fullgraph=True
    )
    assert relative(compiled(), call(LOOPS[name], name, table, IMAGES)) <= 2e-6


@recipes
def test_a_replicated_dtensor_stays_one(name, tmp_path, request):
    """As the page says how."""
    dtensors = pytest.importorskip("torch.distributed.tensor")
    if not hasattr(dtensors, "DTensor"):
        pytest.skip("torch < 2.5 has DTensor under another name")
    want, gradient = result_and_gradient(LOOPS[name], name)
    meet = f"file://{tmp_path}/meet"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
    request.addfinalizer(torch.distributed.destroy_process_group)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    replicate = [dtensors.Replicate()]
    table = dtensors.distribute_tensor(table_of(name).detach(), mesh, replicate).requires_grad_()
    weight = dtensors.distribute_tensor(WEIGHT, mesh, replicate)

    cells = call(RECIPES[name], name, table.to_local())
    out = dtensors.DTensor.from_local(cells, table.device_mesh)
    (out * weight).sum().backward()
    assert relative(out.to_local(), want) <= 2e-6
    assert relative(table.grad.to_local(), gradient) <= 1e-5
