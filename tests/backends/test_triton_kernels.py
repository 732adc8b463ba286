"""The compiled kernels, ``emulated`` on the CPU: the CPU's numbers, no fault, no race; and how large they are.

``triton.py`` itself launches them, so its grids and its memory are tried too. Memory that it leaves uninitialised holds
NaN. The installed Triton compiles for compute capability 9.0. Sizes are counts; no time is known.
"""

import re
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests.support.interpreter import HAS_TRITON, INTERPRETED
from tests.support.oracles import NEW_TIMM, relative, row_major
from tests.support.ptx import Emulated, Fault, compiled
from timm_naflex_fast.backends import eager
from timm_naflex_fast.backends import triton as matmul_triton
from timm_naflex_fast.resampling.matrices import ResizeSpec
from timm_naflex_fast.strategies import STRATEGIES

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed"),
    pytest.mark.skipif(INTERPRETED, reason="nothing is compiled here"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU itself"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]
KERNELS = ["plan_kernel", "strips_kernel", "add_kernel", "strips_grad_kernel", "table_grad_kernel"]
SIZES = [(3, 4), (5, 2), (4, 4), (3, 4)]
BICUBIC, BILINEAR = ResizeSpec(), ResizeSpec("bilinear")
SAMPLED = ResizeSpec("bicubic", False, sampler="grid_sample")
BF16, FP16 = torch.bfloat16, torch.float16


def case(table=(6, 8), channels=64, sizes=SIZES, length=18, spec=BICUBIC, dtype=torch.float32, copy=False, rolls=()):
    """Whether the kernels give the CPU's sums and gradient for one batch: in place, or by the operators, which copy."""
    torch.manual_seed(0)
    table = torch.randn(*table, channels, requires_grad=True)
    x, g = (torch.randn(len(sizes), length, channels).to(dtype) for _ in range(2))
    coord = row_major(sizes, length)
    for sample, by in zip(coord, rolls):
        sample.copy_(sample.roll(by, 0))
    want, out = x.clone(), x.clone()
    eager.add(want, (table,), coord, spec, STRATEGIES["matmul"])
    want_grad = eager.gradient(g, table.shape, coord, spec)
    if copy:
        out = matmul_triton.operator_sum(x, table, coord, spec)
        grad = matmul_triton.operator_gradient(g, table.shape, coord, spec)
    else:
        matmul_triton.add(out, (table,), coord, spec)
        (grad,) = torch.autograd.grad(out, table, g)
    apart = (out.float() - want.float()).abs().nan_to_num(nan=torch.inf)
    if dtype == torch.float32:
        near = apart.max() <= 4e-6
    else:  # a tie may round to the other side
        near = (apart > 0).float().mean() <= 0.01 and apart.max() <= 8 * torch.finfo(dtype).eps
    return bool(near) and relative(grad, want_grad) <= 1e-5


@pytest.fixture
def emulated(monkeypatch):
    """The kernels' places taken by their emulations, without a trial before; memory that nobody wrote is NaN."""
    from timm_naflex_fast.backends import triton_kernels

    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(0x4DCDCDCD if out.dtype == torch.int32 else torch.nan) if out.dtype != torch.uint8 else out

    monkeypatch.setattr(matmul_triton, "LENGTHS", (96, 1100, 4095))
    monkeypatch.setattr(matmul_triton, "agrees", lambda *_: True)
    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))
    found = {name: Emulated(getattr(triton_kernels, name)) for name in KERNELS}
    for name, kernel in found.items():
        monkeypatch.setattr(triton_kernels, name, kernel)
    return found


CASES = {
    "bicubic": dict(),
    "siglip's grids": dict(table=(16, 16), sizes=[(9, 28), (28, 9), (16, 16), (9, 28)], length=256, spec=BILINEAR),
    "bfloat16": dict(dtype=BF16),
    "bfloat16, a copy": dict(dtype=BF16, copy=True),
    "float16, 40 channels, a copy": dict(dtype=FP16, channels=40, copy=True),
    "65 channels, no antialiasing": dict(channels=65, spec=ResizeSpec("bilinear", antialias=not NEW_TIMM)),
    "320 channels: two programs for them": dict(channels=320),
    "a table of odd width": dict(table=(6, 5)),
    "a table wider than a block": dict(table=(2, 70), channels=16, sizes=[(1, 3), (2, 50)], length=100, spec=BILINEAR),
    "70 and 90 rows": dict(sizes=[(70, 1), (90, 2), (3, 4)], length=180, channels=16),
    "64 and 65 rows": dict(sizes=[(64, 1), (65, 1)], length=65, channels=16),
    "70 rows, bfloat16, a copy": dict(sizes=[(70, 1), (3, 4)], length=70, dtype=BF16, copy=True),
    "radio: 2 x 2 cells of the table itself": dict(
        table=(40, 40), channels=32, sizes=[(3, 9), (12, 5), (7, 7)], length=70,
        spec=ResizeSpec("bilinear", False, True, True),
    ),
    "in another order beside in order": dict(rolls=(7, 1)),
    "tokens dropped": dict(rolls=[-1], copy=True),
    "cut short": dict(sizes=SIZES[:2], length=7),
    "with padding tokens": dict(length=40, spec=SAMPLED),
    "with padding tokens, bfloat16, a copy": dict(length=70, spec=SAMPLED, dtype=BF16, copy=True),
    "one grid, 9 samples: in parts": dict(sizes=[(3, 4)] * 9, length=12),
    "the table's own size": dict(table=(4, 4), sizes=[(4, 4)] * 2, length=16, channels=16),
    "one token each": dict(sizes=[(1, 1)] * 2, length=1, channels=16),
    "1,100 tokens: two blocks of the plan": dict(sizes=[(30, 36), (40, 20)], length=1100, spec=BILINEAR, channels=16),
    "172 rows and columns: longer bands": dict(sizes=[(172, 1), (1, 172)], length=172, channels=16),
    "70 samples": dict(sizes=[(1 + i % 9, 1 + i % 5) for i in range(70)], length=45, channels=16),
}  # fmt: skip
QUICK = {"bicubic", "bfloat16, a copy", "tokens dropped", "radio: 2 x 2 cells of the table itself"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in CASES])
def test_compiled_kernels_give_the_cpus_numbers(name, emulated):
    assert case(**CASES[name])
    assert all(kernel.launches for kernel in emulated.values()) or name.startswith("radio")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["in place", "copy", "gradient"])
def test_the_trial_of_compiled_kernels_succeeds(kind, emulated):
    assert matmul_triton._try(torch.device("cpu"), BF16, torch.Size((6, 8, 48)), BICUBIC, kind)


MUTANTS = [  # of a kernel's code, what is replaced by what, and which time it occurs (None: every time)
    *((name, r"bar\.sync", "// ", 1) for name in ("plan_kernel", "strips_kernel", "strips_grad_kernel")),
    *((name, r"@%p\d+ (?=st\.global)", "", -1) for name in KERNELS[1:]),  # the guard of a store
    ("add_kernel", r"fma\.rn\.f32", "mul.f32", None),
    ("add_kernel", r"setp\.lt\.s32", "setp.le.s32", None),
    ("table_grad_kernel", r"fma\.rn\.f32", "mul.f32", None),
    ("plan_kernel", r"redux\.sync\.max", "redux.sync.min", None),
    ("strips_grad_kernel", r"setp\.lt\.s32", "setp.le.s32", None),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, old, new, number", MUTANTS)
def test_a_change_in_the_compiled_code_is_noticed(name, old, new, number, emulated):
    def change(ptx):
        found = list(re.finditer(old, ptx))
        for match in [found[number]] if number is not None else found[::-1]:
            ptx = ptx[: match.start()] + new + ptx[match.end() :]
        assert found
        return ptx

    emulated[name].change = change
    with suppress(Fault):
        assert not case(channels=40, length=45)


TOOLS = Path(__import__("triton").__file__).parent / "backends/nvidia/bin" if HAS_TRITON else Path()
# Of the loop over the tokens' or cells' taps, two at a time: at most so many instructions, and registers; a bound is
# about a tenth above what Triton 3.9 gives, so that another release of it fits.
BOUNDS = [
    ("add_kernel", torch.float32, 66, 140),
    ("add_kernel", BF16, 58, 90),
    ("strips_grad_kernel", torch.float32, 56, 64),
    ("strips_grad_kernel", BF16, 68, 56),
]


@pytest.mark.skipif(not (TOOLS / "nvdisasm").exists(), reason="no disassembler")
@pytest.mark.parametrize("name, dtype, most, most_registers", BOUNDS)
def test_the_inner_loops_stay_short(name, dtype, most, most_registers, tmp_path):
    """For 768 channels and a 16 x 16 table: 32 multiply-adds a thread in the add's loop, 16 in the gradient's."""
    from timm_naflex_fast.backends import triton_kernels

    x, numbers, whole = torch.empty(16, dtype=dtype), torch.empty(16), torch.empty(16, dtype=torch.int32)
    args = {
        "add_kernel": (x, x, numbers, *[whole] * 5, numbers, 5, 16, 768, 64, False, False),
        "strips_grad_kernel": (x, numbers, *[whole] * 3, numbers, 5, 5, 16, 768, False),
    }[name]
    binary, _ = compiled(getattr(triton_kernels, name), args, matmul_triton.FUSE)
    (tmp_path / "cubin").write_bytes(binary.asm["cubin"])
    usage, code = (
        subprocess.run([TOOLS / tool, option, tmp_path / "cubin"], capture_output=True, text=True, check=True).stdout
        for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
    )
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    loops = [body for _, body in re.findall(r"(?=(\.L_x_\d+):(.*?BRA[^\n]*`\(\1\)))", code, re.DOTALL)]
    inner = min((body for body in loops if "FFMA" in body), key=len)
    assert inner.count("FFMA") == (32 if name == "add_kernel" else 16) and inner.count(";") + 1 <= most
    assert registers <= most_registers and stack <= 8
    ptx = binary.asm["ptx"]
    assert "mma" not in ptx and "f64" not in ptx  # no tensor core, no float64
    assert dtype != BF16 or name != "add_kernel" or "cvt.rn.bf16" in ptx  # to the nearest
