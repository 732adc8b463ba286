"""``enable(library="torchtitan")``: the loops of its two vision encoders, replaced and put back.

The loops are here in words of our own, under the names and arguments of torchtitan 0.3.0. Where
that is installed, the first test compares them with its own.
"""

import importlib
import inspect
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.support.checks import one_by_one
from tests.support.oracles import relative
from tests.support.running import running
from timm_naflex_fast import enable, status
from timm_naflex_fast.patching.torchtitan import KIMI, QWEN

NAME = "_compute_learned_pos_embeds"
GRIDS = [[1, 4, 6], [3, 10, 2], [1, 8, 8], [2, 8, 8], [1, 4, 6], [1, 12, 14]]
LENGTH, DIM = 170, 6
WEIGHT = torch.randn(len(GRIDS), LENGTH, DIM)


def padded(images, length, dtype):
    return torch.stack([F.pad(image, (0, 0, 0, length - len(image))) for image in images]).to(dtype)


def qwens(learned_pos_embed, grids, max_num_patch, num_grid_per_side, spatial_merge_size, dim):
    table = learned_pos_embed.view(num_grid_per_side, num_grid_per_side, dim)
    how = dict(mode="bilinear", antialias=False, align_corners=True, merge=spatial_merge_size)
    return padded(one_by_one(table, grids, **how), max_num_patch, table.dtype)


def time_embed(num_frames, embed_dim, *, base=10000.0, device):
    speed = base ** -(torch.arange(embed_dim // 2, device=device.type) / (embed_dim / 2))
    angle = torch.arange(num_frames, device=device)[:, None] * speed
    return torch.cat((angle.sin(), angle.cos()), 1)


def kimis(pos_embed, grids, max_num_patch, interpolation_mode):
    images = one_by_one(
        pos_embed, grids, dtype=torch.float32, mode=interpolation_mode, antialias=False
    )
    times = [
        time_embed(t, DIM, device=pos_embed.device).repeat_interleave(h * w, 0) * (t > 1)
        for t, h, w in grids
    ]
    return padded(images, max_num_patch, pos_embed.dtype) + padded(
        times, max_num_patch, pos_embed.dtype
    )


LOOPS = {QWEN: qwens, KIMI: kimis}
homes = pytest.mark.parametrize("home", LOOPS)


@pytest.fixture(autouse=True)
def functions(monkeypatch):
    """torchtitan's function by its home: defined there, it calls the loop above."""
    monkeypatch.setitem(sys.modules, "torchtitan", SimpleNamespace(__version__="0.3.0"))
    for home, loop in LOOPS.items():
        module, arguments = ModuleType(home[:-1]), inspect.signature(loop)
        module.loop, module._get_temporal_pos_embed = loop, time_embed
        exec(f"def {NAME}{arguments}: return loop{arguments}", vars(module))
        monkeypatch.setitem(sys.modules, home[:-1], module)
    return {home: function(home) for home in LOOPS}


def function(home):
    return getattr(sys.modules[home[:-1]], NAME)


def table_of(home, dtype=torch.float32):
    shape = (64, DIM) if home == QWEN else (8, 8, DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


def call(home, table, grids=GRIDS, mode="bicubic"):
    return function(home)(table, grids, LENGTH, *((8, 2, DIM) if home == QWEN else (mode,)))


def result_and_gradient(home, *options):
    table = table_of(home)
    out = call(home, table, *options)
    return out.detach(), torch.autograd.grad((out * WEIGHT).sum(), table)[0]


@homes
def test_the_loops_in_our_words_are_those_of_the_installed_release(home, monkeypatch):
    ours = result_and_gradient(home)
    monkeypatch.undo()
    pytest.importorskip(home[:-1], exc_type=ImportError)
    theirs = result_and_gradient(home)
    assert max(map(relative, ours, theirs)) <= 1e-6
    with running(library="torchtitan"):
        assert relative(call(home, table_of(home)), theirs[0]) <= 2e-6


@pytest.mark.parametrize("strategy", ["matmul", "interpolate_cached"])
@pytest.mark.parametrize(
    ("home", "mode"), [(QWEN, "bilinear"), (KIMI, "bicubic"), (KIMI, "bilinear")]
)
def test_equals_torchtitan_forward_and_gradient(functions, home, mode, strategy):
    low = table_of(home, torch.bfloat16)
    for grids in (GRIDS, [[1, h, w] for _, h, w in GRIDS], GRIDS[3:4] * 6):
        want, want_gradient = result_and_gradient(home, grids, mode)
        want_low = call(home, low, grids, mode)
        with running(strategy, library="torchtitan"):
            got, gradient = result_and_gradient(home, grids, mode)
            assert status().calls == {("pos_embed", strategy): 1}
            assert status().replaced == {f"{home[:-1]}.{NAME}": strategy for home in LOOPS}
            got_low = call(home, low, grids, mode)
        assert got.shape == want.shape and (got - want).abs().max() <= 2e-6 * want.abs().max()
        assert relative(gradient, want_gradient) <= 1e-5
        assert (
            torch.equal(got, want) or strategy == "matmul" or home == QWEN
        )  # which is computed in float64 here
        assert got_low.dtype == torch.bfloat16 and relative(got_low, want_low) < 2**-7
        assert (got_low != want_low).float().mean() < 0.01  # ties: float32 is cast once
    assert {home: function(home) for home in LOOPS} == functions


@homes
def test_compiled_without_a_break_and_what_stays_with_torchtitan(home, monkeypatch):
    """Type checks and other interpolations."""
    table = table_of(home)
    want = call(home, table)
    with running(library="torchtitan"):
        got = torch.compile(lambda: call(home, table), backend="eager", fullgraph=True)()
        assert relative(got, want) <= 2e-6 and status().fallbacks == {}
        torch.func.grad(lambda table: call(home, table).sum())(table.detach())
        assert status().fallbacks == {"a torch.func transform": 1}
        if home == KIMI:
            with pytest.raises(
                ValueError, match="align_corners"
            ):  # by the loop above, which knows no "nearest"
                call(home, table, mode="nearest")
            assert status().fallbacks["a table resized by nearest"] == 1
        monkeypatch.setitem(
            sys.modules, "spmd_types", SimpleNamespace(is_type_checking=lambda: True)
        )
        assert (
            torch.equal(call(home, table), want)
            and status().fallbacks["torchtitan's type checks"] == 1
        )


@homes
def test_a_replicated_dtensor_stays_one(home, tmp_path, request):
    dtensors = pytest.importorskip("torch.distributed.tensor")
    if not hasattr(dtensors, "DTensor"):
        pytest.skip("torch < 2.5 has DTensor under another name")
    want, gradient = result_and_gradient(home)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1
    )
    request.addfinalizer(torch.distributed.destroy_process_group)
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    table, weight = (
        dtensors.distribute_tensor(t, mesh, [dtensors.Replicate()])
        for t in (table_of(home), WEIGHT)
    )
    table = table.detach().requires_grad_()
    with running(library="torchtitan"):
        out = call(home, table)
    (out * weight).sum().backward()
    assert (
        relative(out.to_local(), want) <= 2e-6 and relative(table.grad.to_local(), gradient) <= 1e-5
    )


def refused(error, message, *mode, **options):
    with pytest.raises(error, match=message):
        enable(*mode, library="torchtitan", **options)
    assert not status().replaced


def test_a_part_whose_needs_are_not_installed_is_left_out(monkeypatch):
    """Qwen3.5 needs a package that Kimi does not."""
    missing, import_module = {QWEN[:-1]}, importlib.import_module

    def without_fla(name):
        if name in missing:
            raise ModuleNotFoundError("No module named 'fla'", name="fla")
        return import_module(name)

    monkeypatch.setattr(importlib, "import_module", without_fla)
    monkeypatch.delitem(sys.modules, QWEN[:-1])
    with enable(library="torchtitan"):
        assert list(status().replaced) == [f"{KIMI[:-1]}.{NAME}"]
    missing.add(KIMI[:-1])
    monkeypatch.delitem(sys.modules, KIMI[:-1])
    refused(RuntimeError, "No module named 'fla'")


def test_what_is_refused():
    valid = "'grid_sample' is not valid for {}; valid: 'stock', 'interpolate_cached', 'matmul'"
    refused(ValueError, valid.format("mode with torchtitan"), "grid_sample")
    refused(ValueError, valid.format("pos_embed"), pos_embed="grid_sample")
    refused(ValueError, "torchtitan knows no model", model=torch.nn.Linear(2, 2))
    sys.modules["torchtitan"].__version__ = "0.2.9"
    refused(RuntimeError, r"torchtitan 0\.2\.9 is not supported .*: it is too old")
    sys.modules["torchtitan"].__version__ = "0.3.1"
    exec(f"def {NAME}(pos_embed, grids): pass", vars(sys.modules[KIMI[:-1]]))
    refused(RuntimeError, f"{NAME} takes")
