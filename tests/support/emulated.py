"""Launches of the package's kernels on a CPU, of the code that Triton compiles for a GPU.

Triton's interpreter runs a kernel's Python; this runs the compiled code (``ptx``). ``Emulated(kernel)`` stands in a
kernel's place: it is launched with tensors of the CPU, and compiles for compute capability 9.0 with the specializations
that Triton would take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.ptx import THREADS, WARP, Launch, Program

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32"}
POINTERS |= {torch.int64: "*i64"}


def compiled(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The kernel as Triton compiles it for these arguments on compute capability 9.0, and those that remain."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, hints, remain = {}, {}, {}, []
    for i, (param, arg) in enumerate(zip(kernel.params, args, strict=True)):
        specialized = not (param.is_constexpr or param.do_not_specialize)
        if param.is_constexpr or (specialized and isinstance(arg, int) and arg == 1):
            signature[param.name], constants[i,] = "constexpr", arg
            continue
        remain.append(arg)
        signature[param.name] = POINTERS[arg.dtype] if isinstance(arg, Tensor) else "i32"
        if specialized and (arg.data_ptr() if isinstance(arg, Tensor) else arg) % 16 == 0:
            hints[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, hints)
    options = {"num_warps": THREADS // WARP, **options}
    return triton.compile(source, target=GPUTarget("cuda", 90, WARP), options=options), remain


class Emulated:
    """A kernel whose launches are emulated; ``change`` may alter its PTX. ``ran`` counts instructions by opcode."""

    def __init__(self, kernel: Any, change: Callable[[str], str] = str) -> None:
        self.kernel, self.change, self.ran, self.programs = kernel, change, Counter[str](), dict[str, Program]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            binary, remain = compiled(self.kernel, args, options)
            ptx = self.change(binary.asm["ptx"])
            if ptx not in self.programs:
                self.programs[ptx] = Program(ptx)
            with np.errstate(all="ignore"):
                Launch(self.programs[ptx], grid, remain).run(self.ran)

        return launch
