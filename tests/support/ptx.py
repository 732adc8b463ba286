"""An emulator of PTX, what Triton compiles a kernel to: every thread of every program, on a CPU.

It shows what the compiler made of masks, layouts, shared memory and rounding. A launch ends in a ``Fault`` where a
thread

- reads or writes outside the tensors of the launch, or at an address that the width of the access does not divide;
- touches what another program of the same launch writes, other than by atomics;
- touches shared memory that another warp wrote or read since the last barrier, or reads there what nobody wrote.

All threads of a launch are one vector; where they part ways, those with the least address in the code go first. Not
shown: what ``ptxas`` makes of it, the order of memory accesses on a GPU, time.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from tests.support.ptx_memory import Fault, Memory, SharedMemory

THREADS, WARP = 128, 32
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
TYPES = {f"{kind}{bits}": np.dtype(f"{code}{bits // 8}") for kind, code in ("bu", "uu", "si") for bits in UNSIGNED}
TYPES |= {"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"), "pred": np.dtype(bool)}
REGISTERS = {"p": np.dtype(bool), "rs": TYPES["u16"], "r": TYPES["u32"], "rd": TYPES["u64"]}
COMPARE = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal}
COMPARE |= {"ne": np.not_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}
SIMPLE: dict[str, Callable[..., Any]] = {"add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or}
SIMPLE |= {"xor": np.bitwise_xor, "not": np.invert, "neg": np.negative, "abs": np.abs, "mov": lambda a: a}
SIMPLE |= {"min": np.fmin, "max": np.fmax, "mul": lambda a, b, *_: a * b}
SIMPLE |= {"fma": lambda a, b, c: (a.astype("f8") * b + c).astype("f4")}


class Program:
    """PTX as a list of instructions (guard, opcode in parts, operands, text), and the number that each label names."""

    def __init__(self, ptx: str) -> None:
        head, body = ptx[ptx.index(".entry") :].split("{", 1)
        self.params = re.findall(r"\.param\s+\.(\w+).*\s(\w+)", head)
        self.code: list[tuple[str, list[str], list[str], str]] = []
        self.labels: dict[str, int] = {}
        for line in re.sub(r"//.*", "", body[: body.index("\n}")]).split("\n"):
            for text in map(str.strip, line.split(";")):
                if label := re.fullmatch(r"(\$\w+):", text):
                    self.labels[label[1]] = len(self.code)
                elif found := re.match(r"(?:@(!?%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)", text):
                    operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^\s,]+", found[3])
                    self.code.append((found[1] or "", found[2].split("."), operands, text))
        self.starts = {0, *self.labels.values()}


class Launch:
    """One launch: the registers of all threads, the shared memory of all programs, the tensors."""

    def __init__(self, program: Program, grid: tuple[int, ...], args: list[Any]) -> None:
        grid = (*grid, 1, 1)[:3]
        self.program, self.count = program, int(np.prod(grid))
        self.size = self.count * THREADS
        numbers = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args] + [0, 0]
        self.params = {name: TYPES[t].type(n) for (t, name), n in zip(program.params, numbers)}
        thread, cta = np.arange(self.size) % THREADS, np.arange(self.size) // THREADS
        self.cta, self.lane, self.warp = cta, thread % WARP, thread // WARP
        self.special = {"%tid.x": thread, "%ctaid.x": cta % grid[0], "%ctaid.y": cta // grid[0] % grid[1]}
        self.special |= {"%ctaid.z": cta // (grid[0] * grid[1]), "%laneid": self.lane}
        self.special |= {f"%nctaid.{axis}": np.full(self.size, n) for axis, n in zip("xyz", grid)}
        self.registers: dict[str, np.ndarray] = {}
        tensors = {a.data_ptr(): a for a in args if isinstance(a, Tensor) and a.numel()}
        self.memory = [Memory(tensors[start]) for start in sorted(tensors)]
        self.bases = np.array([memory.start for memory in self.memory])
        self.shared = SharedMemory(self.count)

    def run(self, ran: Counter[str]) -> None:
        """Run until every thread has returned."""
        code, starts = self.program.code, self.program.starts
        at, waits, ends = np.zeros(self.size, np.int64), np.zeros(self.size, bool), len(code)
        while (at < ends).any():
            if not (runnable := (at < ends) & ~waits).any():
                raise Fault("some threads wait at a barrier that others never reach")
            here = int(at[runnable].min())
            threads = np.nonzero(runnable & (at == here))[0]
            where: Any = slice(None) if len(threads) == self.size else threads
            while True:  # as far as these threads go together
                guard, op, operands, text = code[here]
                ran[".".join(op)] += 1
                here += 1
                if op[0] in ("bra", "ret", "bar"):
                    go = self.holds(guard, where)
                    if op[0] == "bar":
                        waits[where], at[where] = True, here
                        arrived = (waits | (at >= ends)).reshape(self.count, THREADS).all(1)
                        waits &= ~np.repeat(arrived, THREADS)
                        self.shared.pass_barrier(arrived)
                    else:
                        at[where] = np.where(go, self.program.labels[operands[-1]] if op[0] == "bra" else ends, here)
                    break
                chosen = where if not guard else threads[self.holds(guard, threads)]
                if not guard or len(chosen):
                    self.step(op, operands, chosen, text)
                if here in starts:
                    at[where] = here
                    break

    def holds(self, guard: str, where: Any) -> Any:
        """Whether the guard of an instruction lets each thread pass."""
        return True if not guard else self.registers[guard.lstrip("!")][where] ^ (guard[0] == "!")

    def get(self, name: str, kind: str, where: Any) -> Any:
        """An operand as numbers of a type: of a register for the threads ``where``, otherwise one number."""
        if kind == "bf16":
            return from_half(self.get(name, "u16", where), kind)
        dtype = TYPES[kind]
        if name in self.special:
            return self.special[name][where].astype(dtype)
        if name.startswith("%"):
            bits = self.registers[name][where]
            same = bits if bits.itemsize == dtype.itemsize else bits.astype(UNSIGNED[dtype.itemsize * 8])
            return same.view(dtype)
        if name == "global_smem":
            return dtype.type(0)
        if name.startswith(("0f", "0d")):
            return np.array(int(name[2:], 16), UNSIGNED[len(name) * 4 - 8]).view(dtype)[()]
        return np.array(int(name, 0) & (2 ** (dtype.itemsize * 8) - 1), UNSIGNED[dtype.itemsize * 8]).view(dtype)[()]

    def put(self, name: str, value: Any, where: Any) -> None:
        """Set a register of the threads ``where``."""
        dtype = REGISTERS[re.match(r"%([a-z]+)", name)[1]]  # type: ignore[index]
        if name not in self.registers:
            self.registers[name] = np.zeros(self.size, dtype)
        value = np.asarray(value)
        if value.itemsize != dtype.itemsize:
            raise Fault(f"{name} is set to {value.dtype}")
        self.registers[name][where] = value.view(dtype)

    def step(self, op: list[str], operands: list[str], where: Any, text: str) -> None:
        """One instruction, for the threads ``where``."""
        root, kind = op[0], op[-1]
        get = lambda i, t=kind: self.get(operands[i], t, where)
        if root in ("ld", "st", "atom", "red"):
            return self.access(op, operands, where, text)
        if root in ("shfl", "redux", "stmatrix"):
            return self.exchange(op, operands, where, text)
        if root == "mov" and "{" in text:
            return self.pack(operands, kind, where)
        if root == "setp":
            a, b, test = get(1), get(2), op[1]
            unordered = kind[0] == "f" and test not in COMPARE and test[-1] == "u"
            out = COMPARE[test[:-1] if unordered else test](a, b) | (unordered & (np.isnan(a) | np.isnan(b)))
            if op[2] in ("and", "or"):
                out = SIMPLE[op[2]](out, get(3, "pred"))
        elif root == "selp":
            out = np.where(get(3, "pred"), get(1), get(2))
        elif root == "cvt":
            out = self.convert(op, operands, where)
        elif root in ("mul", "mad") and kind != "f32":
            wide = kind[0] + str(int(kind[1:]) * (1 + (op[1] in ("wide", "hi"))))
            out = get(1).astype(TYPES[wide]) * get(2).astype(TYPES[wide])
            out = (out >> int(kind[1:])).astype(TYPES[kind]) if op[1] == "hi" else out
            out = out + get(3, kind if op[1] == "hi" else wide) if root == "mad" else out
        elif root in ("div", "rem"):
            a, b = get(1).astype(np.int64), get(2).astype(np.int64)
            quotient = np.where(b == 0, 0, np.abs(a) // np.maximum(np.abs(b), 1) * np.sign(a) * np.sign(b))
            out = (quotient if root == "div" else a - quotient * b).astype(TYPES[kind])
        elif root in ("shl", "shr"):
            bits, a, by = int(kind[1:]), get(1), get(2, "u32")
            kept = np.minimum(by, bits - 1).astype(a.dtype)
            out = a << kept if root == "shl" else a >> kept
            out = out if kind[0] == "s" else np.where(by < bits, out, out.dtype.type(0))
        elif root == "bfe":
            a = get(1)
            out = (a >> get(2, "u32").astype(a.dtype)) & (
                (a.dtype.type(1) << get(3, "u32").astype(a.dtype)) - a.dtype.type(1)
            )
        elif kind in ("bf16x2", "f16x2"):
            pairs = [get(i, "u32") for i in range(1, len(operands))]
            low, high = (SIMPLE[root](*(from_half(p >> np.uint32(by), kind) for p in pairs)) for by in (0, 16))
            out = to_half(high, kind) << np.uint32(16) | to_half(low, kind)
        else:
            out = SIMPLE[root](*(get(i) for i in range(1, len(operands))))
        self.put(operands[0].split("|")[0], out, where)

    def pack(self, operands: list[str], kind: str, where: Any) -> None:
        """``mov`` between a register and the registers that hold its parts."""
        names = lanes(operands[0] if operands[0][0] == "{" else operands[1])
        bits = int(kind[1:]) // len(names)
        if operands[0][0] == "{":
            whole = self.get(operands[1], kind, where)
            for i, name in enumerate(names):
                self.put(name, (whole >> whole.dtype.type(bits * i)).astype(UNSIGNED[bits]), where)
        else:
            parts = [self.get(name, f"u{bits}", where).astype(TYPES[kind]) for name in names]
            self.put(operands[0], sum(p << p.dtype.type(bits * i) for i, p in enumerate(parts)), where)

    def convert(self, op: list[str], operands: list[str], where: Any) -> Any:
        to, of = op[-2:]
        if to in ("bf16x2", "f16x2"):
            high, low = (to_half(self.get(name, "f32", where), to) for name in operands[1:])
            return high << np.uint32(16) | low
        value = self.get(operands[1], of, where)
        return to_half(value, to).astype(np.uint16) if to == "bf16" else value.astype(TYPES[to])

    def addresses(self, operand: str, where: Any) -> Any:
        base, offset = re.fullmatch(r"\[\s*([^\s+]+)\s*(?:\+\s*(-?\w+)\s*)?\]", operand).groups()  # type: ignore[union-attr]
        start = self.get(base, "s64" if base.startswith("%rd") else "s32", where)
        return np.broadcast_to(start, self.cta[where].shape).astype(np.int64) + int(offset or 0)

    def access(self, op: list[str], operands: list[str], where: Any, text: str) -> None:
        """Loads, stores and atomics."""
        if op[1] == "param":
            number = self.params[operands[1].strip("[ ]")].view(TYPES[op[-1]])
            wide = TYPES[op[-1][0] + "64"] if operands[0].startswith("%rd") else number.dtype
            return self.put(operands[0], np.full(self.cta[where].shape, number, wide), where)
        root, nbytes = op[0], int(op[-1][1:]) // 8
        goes_in = root in ("st", "red")
        names, address = lanes(operands[goes_in]), operands[not goes_in]
        at = self.addresses(address, where)
        if (at % (nbytes * len(names))).any():
            raise Fault(f"misaligned: {text}")
        for i, name in enumerate(names):
            if op[1].startswith("shared"):
                who, held = (self.cta[where], self.warp[where]), self.shared.bytes
                cells = self.shared.cells(at + i * nbytes, nbytes, *who, root == "st", text)
            else:
                cells, held = self.global_cells(at + i * nbytes, nbytes, where, root, text)
            if root == "ld":
                self.put(name, gather(held, cells, nbytes), where)
            elif root == "st":
                value = np.broadcast_to(self.get(name, f"u{nbytes * 8}", where), at.shape)
                for k in range(nbytes):
                    held[cells + k] = (value >> value.dtype.type(8 * k)).astype(np.uint8)
            else:
                old, numbers = gather(held, cells, 4), held.view(np.int32)
                add = {"add": np.add, "max": np.maximum, "min": np.minimum}[op[-2]]
                add.at(numbers, cells // 4, self.get(operands[-1], "s32", where))
                self.put(name, old, where) if root == "atom" else None
        return None

    def global_cells(self, at: Any, nbytes: int, where: Any, root: str, text: str) -> Any:
        """Where in a tensor's bytes the addresses lie, and those bytes."""
        found = np.searchsorted(self.bases, at, "right") - 1
        if not len(found) or found.min() != found.max() or found[0] < 0:
            raise Fault(f"outside of every tensor, or in several at once: {text}")
        memory = self.memory[found[0]]
        cells = at - memory.start
        if (cells + nbytes > len(memory.bytes)).any():
            raise Fault(f"outside of the tensor {tuple(memory.tensor.shape)}: {text}")
        memory.check(cells, nbytes, self.cta[where], root, text)
        return cells, memory.bytes

    def exchange(self, op: list[str], operands: list[str], where: Any, text: str) -> None:
        """Between the lanes of a warp, all of which must be there."""
        warps = np.bincount((self.cta * 4 + self.warp)[where], minlength=self.count * 4)
        if not np.isin(warps, (0, WARP)).all():
            raise Fault(f"a part of a warp: {text}")
        thread, lane = np.arange(self.size)[where], self.lane[where]
        if op[0] == "stmatrix":  # lane 8 m + r names row r of matrix m; lane 4 r + q holds its bytes 4 q to 4 q + 3
            whole = np.zeros(self.size, np.int64)
            whole[where] = self.addresses(operands[0], where)
            for m, name in enumerate(lanes(operands[1])):
                at = whole[thread - lane + 8 * m + lane // 4] + 4 * (lane % 4)
                cells = self.shared.cells(at, 4, self.cta[where], self.warp[where], True, text)
                for k in range(4):
                    self.shared.bytes[cells + k] = (self.get(name, "u32", where) >> np.uint32(8 * k)).astype(np.uint8)
            return
        value = np.broadcast_to(self.get(operands[1], op[-1], where), lane.shape)
        if op[0] == "redux":
            rows = {"add": np.add, "max": np.maximum, "min": np.minimum}[op[2]].reduce(value.reshape(-1, WARP), 1)
            return self.put(operands[0], np.repeat(rows.astype(value.dtype), WARP), where)
        by, limits = (self.get(operands[i], "s32", where).astype(np.int64) for i in (2, 3))
        segment, clamp = limits >> 8 & 31, limits & 31
        least, most = lane & segment, (lane & segment) | (clamp & ~segment)
        other = {"bfly": lane ^ by, "up": lane - by, "down": lane + by, "idx": least | (by & ~segment)}[op[2]]
        fits = other >= most if op[2] == "up" else other <= most
        self.put(operands[0].split("|")[0], value[np.arange(len(lane)) - lane + np.where(fits, other, lane)], where)


def lanes(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{ }").split(",")]


def gather(held: Any, cells: Any, nbytes: int) -> Any:
    return held[cells[:, None] + np.arange(nbytes)].view(UNSIGNED[nbytes * 8])[:, 0]


def from_half(bits: Any, kind: str) -> Any:
    """The float32 of the lower 16 bits."""
    low = np.asarray(bits).astype(np.uint16)
    return low.view(np.float16).astype("f4") if kind[0] == "f" else (low.astype("u4") << np.uint32(16)).view("f4")


def to_half(value: Any, kind: str) -> Any:
    """Rounded to the nearest, ties to even, as the lower bits of uint32."""
    value = np.asarray(value, "f4")
    if kind[0] == "f":
        return value.astype(np.float16).view(np.uint16).astype("u4")
    bits = value.view("u4")
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(0x7FFF), rounded)
