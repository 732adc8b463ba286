"""The compiled kernels, ``emulated`` on the CPU: the CPU's numbers, no fault, no race; and how large they are.

``triton.py`` itself launches them, so its grids and its memory are tried too. Memory that it leaves uninitialised holds
NaN. The installed Triton compiles for compute capability 9.0. Sizes are counts; no time is known.
"""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from tests.support.interpreter import HAS_TRITON, INTERPRETED
from tests.support.oracles import NEW_TIMM, relative, row_major
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


def shuffled(coord):
    coord[0, :6] = coord[0, :6].flip(0)
    coord[1] = coord[1].roll(1, 0)


def dropped(coord):
    coord[0, :-1] = coord[0, 1:].clone()


def case(table=(6, 8), channels=64, sizes=SIZES, length=18, spec=BICUBIC, dtype=torch.float32, copy=False, alter=None):
    """One batch, forward and gradient, by the kernels and by the CPU: the largest difference of each, and both sums."""
    torch.manual_seed(0)
    table = torch.randn(*table, channels)
    x, g = (torch.randn(len(sizes), length, channels).to(dtype) for _ in range(2))
    coord = row_major(sizes, length)
    if alter:
        alter(coord)
    want = x.clone()
    eager.add(want, (table,), coord, spec, STRATEGIES["matmul"])
    want_grad = eager.gradient(g, table.shape, coord, spec)
    facts = matmul_triton.read_batch(coord, x.device, table.shape, spec)
    out = torch.full_like(x, torch.nan) if copy else x.clone()
    matmul_triton.launch_forward(x if copy else out, out, table, facts, spec)
    grad = matmul_triton.table_grad(g, table.shape, facts, spec)
    apart = (out.float() - want.float()).abs().nan_to_num(nan=torch.inf)
    if dtype == torch.float32:
        near = apart.max() <= 4e-6
    else:  # a tie may round to the other side
        near = (apart > 0).float().mean() <= 0.01 and apart.max() <= 8 * torch.finfo(dtype).eps
    return bool(near) and relative(grad, want_grad) <= 1e-5


@pytest.fixture
def emulated(monkeypatch):
    """The kernels' places taken by their emulations."""
    from tests.support.ptx import Emulated
    from timm_naflex_fast.backends import triton_kernels

    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(0x4DCDCDCD if out.dtype == torch.int32 else torch.nan) if out.dtype != torch.uint8 else out

    monkeypatch.setattr(matmul_triton, "LENGTHS", (96, 1100, 4095))
    monkeypatch.setattr(matmul_triton.torch, "empty", poisoned)
    found = {name: Emulated(getattr(triton_kernels, name)) for name in KERNELS}
    for name, kernel in found.items():
        monkeypatch.setattr(triton_kernels, name, kernel)
    return found


CASES = {
    "bicubic": dict(),
    "bilinear, W0 = 16, siglip's grids": dict(
        table=(16, 16), sizes=[(9, 28), (28, 9), (16, 16), (9, 28)], length=256, spec=BILINEAR
    ),
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
    "in another order beside in order": dict(alter=shuffled),
    "tokens dropped": dict(alter=dropped, copy=True),
    "cut short": dict(sizes=SIZES[:2], length=7),
    "with padding tokens": dict(length=40, spec=SAMPLED),
    "with padding tokens, bfloat16, a copy": dict(length=70, spec=SAMPLED, dtype=BF16, copy=True),
    "one grid, 9 samples: in parts": dict(sizes=[(3, 4)] * 9, length=12),
    "the table's own size": dict(table=(4, 4), sizes=[(4, 4)] * 2, length=16, channels=16),
    "one token each": dict(sizes=[(1, 1)] * 2, length=1, channels=16),
    "1,100 tokens: two blocks of the plan": dict(sizes=[(30, 36), (40, 20)], length=1100, spec=BILINEAR, channels=16),
    "70 samples": dict(sizes=[(1 + i % 9, 1 + i % 5) for i in range(70)], length=45, channels=16),
}  # fmt: skip
QUICK = {"bicubic", "bfloat16, a copy", "tokens dropped"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_compiled_kernels_give_the_cpus_numbers(name, emulated):
    assert case(**CASES[name])
    assert all(kernel.launches for kernel in emulated.values()) or name.startswith("radio")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["in place", "copy", "gradient"])
def test_the_trial_of_compiled_kernels_succeeds(kind, emulated, monkeypatch):
    monkeypatch.setattr(matmul_triton, "_agreed", {})
    assert matmul_triton.agrees(torch.zeros(1, 4, 48, dtype=BF16), torch.Size((6, 8, 48)), BICUBIC, kind)


def without_barrier(number):
    def change(ptx):
        *before, after = ptx.split("bar.sync", number + 1)
        assert len(before) == number + 1
        return "bar.sync".join(before) + "// " + after

    return change


def without_guard(opcode, number):
    """Without the predicate of the last such instructions."""

    def change(ptx):
        found = list(re.finditer(rf"@%p\d+ (?={opcode})", ptx))[number]
        return ptx[: found.start()] + ptx[found.end() :]

    return change


def replaced(old, new):
    def change(ptx):
        assert old in ptx
        return ptx.replace(old, new)

    return change


MUTANTS = [
    ("plan_kernel", without_barrier(1)),
    ("strips_kernel", without_barrier(1)),
    ("strips_grad_kernel", without_barrier(1)),
    ("strips_kernel", without_guard("st.global", -1)),
    ("add_kernel", without_guard("st.global", -1)),
    ("strips_grad_kernel", without_guard("st.global", -1)),
    ("table_grad_kernel", without_guard("st.global", -1)),
    ("add_kernel", replaced("fma.rn.f32", "mul.f32")),
    ("add_kernel", replaced("setp.lt.s32", "setp.le.s32")),
    ("table_grad_kernel", replaced("fma.rn.f32", "mul.f32")),
    ("plan_kernel", replaced("redux.sync.max", "redux.sync.min")),
    ("strips_grad_kernel", replaced("setp.lt.s32", "setp.le.s32")),
]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(MUTANTS)))
def test_a_change_in_the_compiled_code_is_noticed(number, emulated):
    from tests.support.ptx import Fault

    name, emulated[MUTANTS[number][0]].change = MUTANTS[number]
    try:
        right = case(channels=40, length=45)
    except Fault:
        return
    assert not right, name


TOOLS = "backends/nvidia/bin"


def sizes(binary):
    """Registers, bytes of stack, and of each loop, inner ones first, its instructions and multiply-adds."""
    import triton

    tools = Path(triton.__file__).parent / TOOLS
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([tools / tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for tool, option in (("cuobjdump", "-res-usage"), ("nvdisasm", "-c"))
        )
    code, labels, loops = [], {}, []
    for line in sass.split("\n"):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            code.append(instruction[1])
            back = re.search(r"BRA.*`\((\.L_x_\d+)\)", instruction[1])
            if back and back[1] in labels:
                inside = code[labels[back[1]] :]
                loops.append((len(inside), sum("FFMA" in one for one in inside)))
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    return registers, stack, loops


# Of the loop over the tokens' or cells' taps, two at a time: at most so many instructions, and registers; a bound is
# about a tenth above what Triton 3.9 gives, so that another release of it fits.
BOUNDS = {
    ("add_kernel", torch.float32): (66, 140),
    ("add_kernel", BF16): (58, 90),
    ("strips_grad_kernel", torch.float32): (56, 64),
    ("strips_grad_kernel", BF16): (68, 56),
}


@pytest.mark.skipif(
    not HAS_TRITON or not (Path(__import__("triton").__file__).parent / TOOLS / "nvdisasm").exists(),
    reason="no disassembler",
)
@pytest.mark.parametrize("name, dtype", BOUNDS, ids=str)
def test_the_inner_loops_stay_short(name, dtype):
    """For 768 channels and a 16 x 16 table: 32 multiply-adds a thread in the add's loop, 16 in the gradient's."""
    from tests.support.ptx import compiled
    from timm_naflex_fast.backends import triton_kernels

    x, numbers, whole = torch.empty(16, dtype=dtype), torch.empty(16), torch.empty(16, dtype=torch.int32)
    args = {
        "add_kernel": (x, x, numbers, *[whole] * 5, numbers, 5, 16, 768, 64, False, False),
        "strips_grad_kernel": (x, numbers, *[whole] * 3, numbers, 5, 5, 16, 768, False),
    }[name]
    binary, _ = compiled(getattr(triton_kernels, name), args, matmul_triton.FUSE)
    registers, stack, loops = sizes(binary)
    most, most_registers = BOUNDS[name, dtype]
    length, products = next(loop for loop in loops if loop[1])
    assert products == (32 if name == "add_kernel" else 16) and length <= most
    assert registers <= most_registers and stack <= 8
    ptx = binary.asm["ptx"]
    assert "mma" not in ptx and "f64" not in ptx  # no tensor core, no float64
    assert dtype != BF16 or name != "add_kernel" or "cvt.rn.bf16" in ptx  # to the nearest
