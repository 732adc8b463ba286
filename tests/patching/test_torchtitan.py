"""``enable(library="torchtitan")``: the loops of its two vision encoders, replaced and put back."""

import builtins
import importlib
import sys
from types import FunctionType, ModuleType

import pytest
import torch

from tests.support import titan
from tests.support.oracles import relative
from tests.support.running import running
from timm_naflex_fast import disable, enable, status
from timm_naflex_fast.patching.torchtitan import KIMI, QWEN

NAME = "_compute_learned_pos_embeds"
GRIDS = [[1, 4, 6], [3, 10, 2], [1, 8, 8], [2, 8, 8], [1, 4, 6], [1, 12, 14]]
LENGTH, DIM = 170, 6


@pytest.fixture
def modules(monkeypatch):
    """torchtitan's two modules by their home, with its loops in words of our own."""
    for home in ("torchtitan", QWEN[:-1], KIMI[:-1]):
        parts = home.split(".")
        for name in (".".join(parts[: n + 1]) for n in range(len(parts))):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["torchtitan"].__version__ = titan.__version__
    found = {QWEN: sys.modules[QWEN[:-1]], KIMI: sys.modules[KIMI[:-1]]}
    for home, functions in ((QWEN, titan.Qwen), (KIMI, titan.Kimi)):
        module = vars(found[home])
        module |= {name: value for name, value in vars(titan).items() if not name.startswith("__")}
        module["__builtins__"] = builtins
        for name, f in vars(functions).items():
            if isinstance(f, FunctionType):  # the same code, defined in that module
                module[name] = FunctionType(f.__code__, module, name, f.__defaults__, f.__closure__)
                module[name].__kwdefaults__ = f.__kwdefaults__
    yield found
    disable()


@pytest.mark.parametrize("home", [QWEN, KIMI])
def test_the_loops_in_our_words_are_those_of_the_installed_release(home):
    theirs = pytest.importorskip(home[:-1], exc_type=ImportError)
    ours = ModuleType("ours")
    vars(ours).update(vars(titan.Qwen if home == QWEN else titan.Kimi))
    for got, want in zip(result_and_gradient({home: ours}, home), result_and_gradient({home: theirs}, home)):
        assert relative(got, want) <= 1e-6
    with enable(library="torchtitan"):
        got, _ = result_and_gradient({home: theirs}, home)
        assert status().calls == {("pos_embed", "matmul"): 1}
    assert relative(got, want := result_and_gradient({home: theirs}, home)[0]) <= 2e-6, want


def call(modules, home, table, grids=GRIDS, mode="bicubic"):
    function = getattr(modules[home], NAME)
    if home == QWEN:
        return function(table, grids, LENGTH, 8, 2, DIM)
    return function(table, grids, LENGTH, mode)


def table_of(home, dtype=torch.float32):
    shape = (64, DIM) if home == QWEN else (8, 8, DIM)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()


def result_and_gradient(modules, home, **options):
    table = table_of(home)
    out = call(modules, home, table, **options)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return out.detach(), torch.autograd.grad((out * weight).sum(), table)[0]


@pytest.mark.parametrize("mode", ["matmul", "interpolate_cached"])
@pytest.mark.parametrize("home", [QWEN, KIMI])
def test_equals_torchtitan_forward_and_gradient(modules, home, mode):
    before = {home: getattr(module, NAME) for home, module in modules.items()}
    low = table_of(home, torch.bfloat16)
    for grids in (GRIDS, [[1, h, w] for _, h, w in GRIDS]):
        want, gradient = result_and_gradient(modules, home, grids=grids)
        want_low = call(modules, home, low, grids)
        with running(mode, library="torchtitan"):
            got, found = result_and_gradient(modules, home, grids=grids)
            assert status().calls == {("pos_embed", mode): 1}
            assert status().replaced == {f"{home[:-1]}.{NAME}": mode for home in (KIMI, QWEN)}
            got_low = call(modules, home, low, grids)
        assert got.shape == want.shape and (got - want).abs().max() <= 2e-6 * want.abs().max()
        assert relative(found, gradient) <= 1e-5
        assert got_low.dtype == torch.bfloat16 and relative(got_low.float(), want_low.float()) < 2**-7
        assert (got_low != want_low).float().mean() < 0.01  # ties: float32 is cast once
    assert all(getattr(module, NAME) is before[home] for home, module in modules.items())


def test_another_interpolation_of_kimis(modules):
    want, gradient = result_and_gradient(modules, KIMI, mode="bilinear")
    with running(library="torchtitan"):
        got, found = result_and_gradient(modules, KIMI, mode="bilinear")
        assert relative(got, want) <= 2e-6 and relative(found, gradient) <= 1e-5
        want = call(modules, KIMI, table_of(KIMI), mode="nearest")
        assert status().fallbacks == {"a table resized by nearest": 1}
    assert torch.equal(call(modules, KIMI, table_of(KIMI), mode="nearest"), want)


@pytest.mark.parametrize("home", [QWEN, KIMI])
def test_compiled_without_a_break(modules, home):
    table = table_of(home)
    want = call(modules, home, table)
    with running(library="torchtitan"):
        got = torch.compile(lambda: call(modules, home, table), backend="eager", fullgraph=True)()
    assert relative(got, want) <= 2e-6


@pytest.mark.parametrize("home", [QWEN, KIMI])
def test_torchtitans_type_checks_see_its_own_code(modules, home, monkeypatch):
    checker = ModuleType("spmd_types")
    checker.is_type_checking = lambda: True
    monkeypatch.setitem(sys.modules, "spmd_types", checker)
    with enable(library="torchtitan"):
        call(modules, home, table_of(home))
        assert status().fallbacks == {"torchtitan's type checks": 1}


@pytest.mark.parametrize("home", [QWEN, KIMI])
def test_a_replicated_dtensor_stays_one(modules, home, tmp_path):
    dtensors = pytest.importorskip("torch.distributed.tensor")
    if not hasattr(dtensors, "DTensor"):
        pytest.skip("torch < 2.5 has DTensor under another name")
    want, gradient = result_and_gradient(modules, home)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        table = dtensors.distribute_tensor(table_of(home).detach(), mesh, [dtensors.Replicate()]).requires_grad_()
        with running(library="torchtitan"):
            out = call(modules, home, table)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        (out * dtensors.distribute_tensor(weight, mesh, [dtensors.Replicate()])).sum().backward()
        assert relative(out.to_local(), want) <= 2e-6 and relative(table.grad.to_local(), gradient) <= 1e-5
    finally:
        torch.distributed.destroy_process_group()


def test_what_cannot_be_chosen_is_named(modules):
    with pytest.raises(ValueError, match=r"grid_sample.*'stock', 'interpolate_cached', 'matmul'"):
        enable("grid_sample", library="torchtitan")
    with pytest.raises(ValueError, match="torchtitan knows no model"):
        enable(library="torchtitan", model=torch.nn.Linear(2, 2))
    assert not status().replaced


def test_a_part_whose_needs_are_not_installed_is_left_out(modules, monkeypatch):
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
    with pytest.raises(RuntimeError, match="No module named 'fla'"):
        enable(library="torchtitan")


def test_an_older_and_a_changed_release_are_refused(modules, monkeypatch):
    monkeypatch.setattr(sys.modules["torchtitan"], "__version__", "0.2.9")
    with pytest.raises(RuntimeError, match=r"needs torchtitan >= 0\.3\.0"):
        enable(library="torchtitan")
    monkeypatch.setattr(sys.modules["torchtitan"], "__version__", "0.3.1")
    changed = FunctionType((lambda pos_embed, grids: None).__code__, vars(modules[KIMI]), NAME)
    monkeypatch.setattr(modules[KIMI], NAME, changed)
    with pytest.raises(RuntimeError, match=f"{NAME} takes"):
        enable(library="torchtitan")
