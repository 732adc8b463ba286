"""An emulator of PTX, what Triton compiles a kernel to: every thread of every program, on a CPU.

It shows what the compiler made of masks, layouts, shared memory and rounding. A launch ends in a ``Fault`` where a
thread

- reads or writes outside the tensors of the launch, or at an address that the width of the access does not divide;
- touches what another program of the same launch writes, other than by atomics;
- touches shared memory that another warp wrote or read since the last barrier.

All threads of a launch are one vector; where they part ways, those with the least address in the code go first. It
knows the instructions that the package's kernels compile to, and no other. Not shown: what ``ptxas`` makes of it, the
order of memory accesses on a GPU, time.
"""

import operator
import re
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch

THREADS, WARP, SHARED = 128, 32, 2**15
NOBODY, MANY, ATOMICS = -1, -2, -3  # who touched a number, beside the numbers of programs and warps
LANE = np.arange(WARP)
TYPES = {f"{kind}{8 * size}": np.dtype(f"{code}{size}") for kind, code in ("bu", "uu", "si") for size in (2, 4, 8)}
TYPES |= {"f32": np.dtype("f4"), "pred": np.dtype(bool)}
HALF = {"bf16": torch.bfloat16, "f16": torch.float16}
SIMPLE = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "rem": np.fmod, "min": np.fmin, "max": np.fmax}
SIMPLE |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "mov": lambda a: a}
SIMPLE |= {"mad": lambda a, b, c: a * b + c, "div": lambda a, b: (a - np.fmod(a, b)) // b}
SIMPLE |= {"fma": lambda a, b, c: (a.astype("f8") * b + c).astype("f4"), "selp": lambda a, b, c: np.where(c, a, b)}
SIMPLE |= {"shl": lambda a, by: a << by.astype(a.dtype), "shr": lambda a, by: a >> by.astype(a.dtype)}
SIMPLE |= {"bfe": lambda a, first, count: a >> first & (np.uint32(1) << count) - np.uint32(1)}
OWN_TYPE = {("selp", 3): "pred", ("shl", 2): "u32", ("shr", 2): "u32"}  # of an operand, unlike the instruction's


class Fault(Exception):
    """The kernel does what it must not."""


@cache
def parse(ptx):
    """The parameters; the instructions: guard, opcode in parts, operands, text; and which of them each label names."""
    head, body = ptx[ptx.index(".entry") :].split("{", 1)
    code, labels = [], {}
    for text in map(str.strip, re.split("[;\n]", re.sub("//.*", "", body[: body.index("\n}")]))):
        if label := re.fullmatch(r"(\$\w+):", text):
            labels[label[1]] = len(code)
        elif found := re.match(r"(?:@(!?%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)", text):
            operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^\s,]+", found[3])
            code.append((found[1] or "", found[2].split("."), operands, text))
    return re.findall(r"\.param\s+\.\w+.*\s(\w+)", head), code, labels


class Memory:
    """Bytes, and who, a program or a warp, has written or read each number of ``unit`` bytes."""

    def __init__(self, held, unit):
        self.bytes, self.unit = held, unit
        self.writer, self.reader = (np.full(len(held) // unit, NOBODY) for _ in range(2))

    def clashes(self, at, nbytes, who, root, may_meet):
        """Note who touches the bytes from ``at`` on; whether others did, other than by reading alone or by atomics."""
        clash, who = False, ATOMICS if root == "red" else who
        for first in range(0, nbytes, min(nbytes, self.unit)):
            spot = (at + first) // self.unit
            wrote, read = ((owner[spot] != NOBODY) & (owner[spot] != who) for owner in (self.writer, self.reader))
            if root == "ld":
                self.reader[spot] = np.where(read, MANY, who)
                self.reader[spot[self.reader[spot] != who]] = MANY  # two in this very step
                clash |= wrote.any()
            else:
                clash |= (wrote | read).any()
                self.writer[spot] = who
                clash |= not may_meet and (self.writer[spot] != who).any()  # two in this very step
        return clash


class Launch:
    """One launch: the registers of all threads, 64 bits each, the shared memory of all programs, the tensors."""

    def __init__(self, ptx, grid, args):
        params, self.code, self.labels = parse(ptx)
        grid = (*grid, 1, 1)[:3]
        self.thread = np.arange(np.prod(grid) * THREADS)
        self.cta, self.warp = self.thread // THREADS, self.thread // WARP
        self.registers = {"%tid.x": (self.thread % THREADS).astype("u8")}
        for axis, count, index in zip("xyz", grid, np.unravel_index(self.cta, grid, order="F")):
            self.registers[f"%ctaid.{axis}"] = index.astype("u8")
            self.registers[f"%nctaid.{axis}"] = np.full_like(self.thread, count).view("u8")
        numbers = [arg.data_ptr() if isinstance(arg, torch.Tensor) else arg for arg in args] + [0, 0]
        self.params = dict(zip(params, np.array(numbers)))
        # The shared memory of the programs, one after the other, lies at address 0; what nobody wrote is NaN.
        self.memory = {0: Memory(np.full(len(self.thread) // THREADS * SHARED, 255, "u1"), 4)}
        for arg in args:
            if isinstance(arg, torch.Tensor) and arg.numel():
                held = arg.detach().view(-1).view(torch.uint8).numpy()
                self.memory[arg.data_ptr()] = Memory(held, arg.element_size())
        self.starts = np.array(sorted(self.memory))

    def run(self):
        """Run until every thread has returned."""
        starts, ends = {*self.labels.values()}, len(self.code)
        at, waits = np.zeros_like(self.thread), np.zeros(len(self.thread), bool)
        while (at < ends).any():
            runnable = (at < ends) & ~waits
            here = int(at[runnable].min())  # an error where some wait at a barrier that others never reach
            threads = np.nonzero(runnable & (at == here))[0]
            where = slice(None) if len(threads) == len(at) else threads
            while True:  # as far as these threads go together
                guard, op, operands, self.text = self.code[here]
                here += 1
                passes = self.get(guard.lstrip("!"), "pred", where) ^ (guard[0] == "!") if guard else True
                if op[0] == "bar":
                    waits[where], at[where] = True, here
                    arrived = (waits | (at >= ends)).reshape(-1, THREADS).all(1)
                    waits &= ~np.repeat(arrived, THREADS)
                    for owner in (self.memory[0].writer, self.memory[0].reader):
                        owner.reshape(len(arrived), -1)[arrived] = NOBODY
                    break
                if op[0] in ("bra", "ret"):
                    at[where] = np.where(passes, self.labels[operands[-1]] if op[0] == "bra" else ends, here)
                    break
                chosen = threads[passes] if guard else where
                if not guard or len(chosen):
                    self.step(op, operands, chosen)
                if here in starts:
                    at[where] = here
                    break

    def get(self, name, kind, where):
        """An operand as numbers of a type: of a register for the threads ``where``, otherwise one number."""
        if name.startswith("%"):
            bits = self.registers[name][where]
        else:  # a float, where shared memory begins, an integer
            number = int(name[2:], 16) if name.startswith("0f") else 0 if name == "global_smem" else int(name, 0)
            bits = np.uint64(number % 2**64)
        return bits != 0 if kind == "pred" else bits.astype(f"u{TYPES[kind].itemsize}").view(TYPES[kind])

    def put(self, name, value, where):
        """Set a register of the threads ``where``."""
        bits = np.asarray(value)
        self.registers.setdefault(name, np.zeros(len(self.thread), "u8"))[where] = bits.view(f"u{bits.itemsize}")

    def step(self, op, operands, where):
        """One instruction, for the threads ``where``."""
        root, kind = op[0], op[-1]
        get = lambda i, t=kind: self.get(operands[i], t, where)
        if root in ("ld", "st", "red", "stmatrix"):
            return self.access(op, operands, where)
        if root == "mov" and operands[0][0] == "{":  # the parts of a register
            names = lanes(operands[0])
            for name, part in zip(names, get(1).reshape(-1, 1).view(f"u{TYPES[kind].itemsize // len(names)}").T):
                self.put(name, part, where)
            return None
        if root == "mov" and operands[1][0] == "{":  # a register of parts
            names = lanes(operands[1])
            parts = [self.get(name, f"u{TYPES[kind].itemsize * 8 // len(names)}", where) for name in names]
            out = np.stack(parts, -1).view(TYPES[kind])[..., 0]
        elif root == "redux":
            values = self.by_warp(get(1), where)
            out = np.repeat(SIMPLE[op[2]].reduce(values, 1, dtype=values.dtype), WARP)
        elif root == "shfl":
            by = self.by_warp(get(2, "s32"), where) & 31
            other = {"bfly": LANE ^ by, "up": LANE - by, "idx": by}[op[2]]
            out = np.take_along_axis(self.by_warp(get(1), where), np.where(other < 0, LANE, other), 1).ravel()
        elif root == "setp":
            a, b = get(1), get(2)
            out = getattr(operator, op[1][:2])(a, b)
            if len(op[1]) == 3:  # true for NaN
                out |= np.isnan(a) | np.isnan(b)
        elif root == "cvt" and kind in HALF:
            out = floats(get(1, "u32"), kind)[..., 0]
        elif root == "cvt" and op[-2].removesuffix("x2") in HALF:  # one number, or the high and the low one
            out = halves(np.stack([get(-1), get(1)], -1), op[-2].removesuffix("x2"))
        elif root == "cvt":
            out = get(1).astype(TYPES[op[-2]])
        elif kind[:-2] in HALF:
            out = halves(SIMPLE[root](*(floats(get(i, "u32"), kind[:-2]) for i in (1, 2))), kind[:-2])
        elif "wide" in op or "hi" in op:
            wide = kind[0] + "64"
            out = get(1).astype(TYPES[wide]) * get(2).astype(TYPES[wide])
            out = (out >> 32).astype(TYPES[kind]) if "hi" in op else out + (get(3, wide) if root == "mad" else 0)
        else:
            out = SIMPLE[root](*(get(i, OWN_TYPE.get((root, i), kind)) for i in range(1, len(operands))))
        return self.put(operands[0], out, where)

    def access(self, op, operands, where):
        """Loads, stores and atomics."""
        root, shared = op[0], "shared" in self.text
        names, address = lanes(operands[root != "ld"]), operands[root == "ld"].strip("[ ]")
        if op[1] == "param":
            return self.put(names[0], self.params[address], where)
        base, _, offset = map(str.strip, address.partition("+"))
        base = self.get(base, "s64" if base.startswith("%rd") else "s32", where).astype("i8")
        address = base + int(offset or 0) + shared * SHARED * self.cta[where]
        nbytes = 4 if root == "stmatrix" else int(op[-1][1:]) // 8
        if (address % (nbytes * len(names))).any():
            raise Fault(f"misaligned: {self.text}")
        for i, name in enumerate(names):
            at = address + i * nbytes
            if root == "stmatrix":  # lane 8 i + r names row r of matrix i; lane 4 r + q holds its bytes 4 q to 4 q + 3
                at = (self.by_warp(address, where)[:, 8 * i + LANE // 4] + LANE % 4 * 4).ravel()
            found = np.searchsorted(self.starts, at, "right") - 1
            start = self.starts[found[0]]
            memory, at = self.memory[start], at - start
            is_outside = (found != found[0]) | (at < 0) | (at + nbytes > len(memory.bytes))
            if is_outside.any() or (start == 0) != shared:
                raise Fault(f"outside of the tensors, or in several at once: {self.text}")
            if memory.clashes(at, nbytes, (self.warp if shared else self.cta)[where], root, may_meet=shared):
                raise Fault(f"two programs, or two warps without a barrier, touch one number: {self.text}")
            spots = at[:, None] + np.arange(nbytes)
            if root == "ld":
                self.put(name, memory.bytes[spots].view(f"u{nbytes}")[:, 0], where)
            elif root == "red":
                SIMPLE[op[-2]].at(memory.bytes.view("i4"), at // 4, self.get(name, "s32", where))
            else:
                value = np.broadcast_to(self.get(name, f"u{nbytes * 8}", where), at.shape)
                memory.bytes[spots] = np.ascontiguousarray(value)[:, None].view("u1")
        return None

    def by_warp(self, values, where):
        """The threads' values as (warps, lanes)."""
        if not np.isin(np.bincount(self.warp[where]), (0, WARP)).all():
            raise Fault(f"a part of a warp: {self.text}")
        return np.broadcast_to(values, self.warp[where].shape).reshape(-1, WARP)


def lanes(operand):
    return operand.strip("{ }").replace(" ", "").split(",")


def floats(bits, kind):
    """The two float32 numbers (..., 2) of 32 bits."""
    return torch.from_numpy(bits[..., None].copy().view("i4")).view(HALF[kind]).float().numpy()


def halves(values, kind):
    """Two float32 numbers (..., 2) rounded, in 32 bits."""
    return torch.from_numpy(values.copy()).to(HALF[kind]).view(torch.int32).numpy().view("u4")[..., 0]


def compiled(kernel, args, options):
    """The kernel as Triton compiles it for these arguments on compute capability 9.0, and those that remain."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    gpu = dict(get_current_target=lambda: GPUTarget("cuda", 90, WARP), get_current_device=lambda: 0)
    with patch.object(driver, "_active", SimpleNamespace(**gpu, get_current_stream=lambda _: 0)):
        binary = kernel.warmup(*args, grid=(1,), num_warps=THREADS // WARP, **options)
    return binary, [a for p, a in zip(kernel.params, args) if binary.src.signature[p.name] != "constexpr"]


class Emulated:
    """Stands in a kernel's place: launches what Triton compiles for a GPU, with tensors of the CPU.

    ``change`` may alter the PTX before it runs.
    """

    def __init__(self, kernel):
        self.kernel, self.change, self.launches = kernel, str, 0

    def __getitem__(self, grid):
        def launch(*args, **options):
            binary, remain = compiled(self.kernel, args, options)
            self.launches += 1
            with np.errstate(all="ignore"):
                Launch(self.change(binary.asm["ptx"]), grid, remain).run()

        return launch
