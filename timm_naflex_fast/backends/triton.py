"""The matmul strategy as Triton kernels: nothing is read back to the host, so CUDA graphs can hold it.

| launch | programs | reads and writes |
| --- | --- | --- |
| plan | a sample | the coordinates, twice; 24 bytes, in training also 4 for each row |
| forward | a sample, C-block | the table; ``x`` of tokens that have an embedding, once each way |
| sort | | one integer for each sample |
| gradient | a row of the table, split of the samples, C-block | ``g`` once per row of the table that sees it |
| sum | | the splits' partial gradients, at most 16 tables |

A sample in row-major order is worked off line by line: the table contracted across the line by the few taps that the
line sees, then along it by an IEEE float32 product (no tensor core, whatever the TF32 flags). The C-block is the
slowest axis of programs, so that all that run at one time share one slice of the table, which fits an SM's L1 cache.
Other orders, and tables without antialiasing (4 or 16 taps a token), are gathered token by token.

In the gradient nothing is added by atomics: a program owns its row, takes its samples by rising width, sums
``A_h^T g`` over all that have the same width, and contracts the sum with A_w once. Bit for bit the same every time.

Predicted, never measured (no GPU was at hand), for one H200 (4.8 TB/s; 30 of 67 TFLOP/s in float32 without tensor
cores; 5.5 TB/s from L2), B=512, C=768, milliseconds:

| work | floor forward, +backward | HBM forward | products forward | L2 forward | L2 gradient |
| --- | --- | --- | --- | --- | --- |
| diverse float32 (x 1.5 GB, 0.48 GB of it in grids) | 0.94, 1.26 | 0.20 | 0.4 | 0.2 to 1.1 | 0.64 |
| diverse bfloat16 | 0.47, 0.63 | 0.10 | 0.4 | 0.2 to 1.1 | 0.32 |
| siglip float32 (x 0.40 GB, nearly all in grids) | 0.25, 0.33 | 0.17 | 0.15 | 0.05 to 0.2 | 0.17 |
| siglip bfloat16 | 0.13, 0.17 | 0.08 | 0.15 | 0.05 to 0.2 | 0.08 |

The span of "L2 forward" is that of L1 hits: a sample reads about 130 (diverse) or 36 (siglip) rows of the table.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..resampling.matrices import Resampling
from ..resampling.precision import once_differentiable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST = 512  # cells along a side of the table: a row of its gradient is held in registers
TOKENS = 32  # of a line, in one product
FORWARD_PROGRAMS, GRAD_PROGRAMS = 2**14, 2**12  # enough to fill a GPU several times over
HAS_TRITON = find_spec("triton") is not None


class Plan(NamedTuple):
    """What the kernels know of a batch: ``rows`` (B, 6) int32, ``norms`` (B, N) float32 or empty."""

    rows: Tensor
    norms: Tensor


def serves(x: Tensor, table: Tensor, how: Resampling) -> bool:
    """Whether the kernels can add this table into this ``x``: on CUDA, in half or single precision, with Triton."""
    if not (HAS_TRITON and x.is_cuda and table.device == x.device) or how.sampler != "interpolate":
        return False
    if x.dtype not in DTYPES or table.dtype not in DTYPES or max(table.shape[-3:-1]) > LONGEST:
        return False
    return torch.compiler.is_compiling() or _agrees(x.device)


def add_learned(x: Tensor, table: Tensor, patch_coord: Tensor, how: Resampling) -> None:
    """Add the table ([1,] H0, W0, C), resampled to each sample's grid, into ``x`` (B, N, C) in place.

    Tokens may be in any order, and any of them dropped. A negative coordinate, which the host could have raised an
    error for, makes its token NaN.
    """
    if x.numel() == 0:
        return
    patch_coord = patch_coord.to(x.device)
    training = torch.is_grad_enabled() and table.requires_grad
    plan = make_plan(patch_coord, table.shape, how, norms=training)
    if training or (torch.is_grad_enabled() and x.requires_grad):
        _AddLearned.apply(x, table, patch_coord, plan.rows, plan.norms, how)
    else:
        launch_forward(x, table, patch_coord, plan, how)


class _AddLearned(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, table: Tensor, patch_coord: Tensor, rows: Tensor, norms: Tensor, how: Resampling) -> Tensor:
        launch_forward(x, table, patch_coord, Plan(rows, norms), how)
        return x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, table, patch_coord, rows, norms, ctx.how = inputs
        ctx.table_shape, ctx.table_dtype = table.shape, table.dtype
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(patch_coord, rows, norms)
        ctx.mark_dirty(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        grad_table = None
        if ctx.needs_input_grad[1]:
            patch_coord, rows, norms = ctx.saved_tensors
            with torch.no_grad():
                grad_table = table_grad(g, ctx.table_shape, patch_coord, Plan(rows, norms), ctx.how)
            grad_table = once_differentiable(grad_table.view(ctx.table_shape).to(ctx.table_dtype), g)
        return g, grad_table, None, None, None, None


def make_plan(patch_coord: Tensor, table_shape: torch.Size, how: Resampling, *, norms: bool) -> Plan:
    """Every sample's grid; with ``norms`` what the gradient of an antialiased table needs too."""
    from . import triton_kernels as kernels

    batch, length = patch_coord.shape[:2]
    coord = patch_coord.detach()
    norms = norms and how.antialias
    rows = torch.empty(batch, kernels.PLAN.value, dtype=torch.int32, device=coord.device)
    sums = torch.empty((batch, length) if norms else (0, 0), dtype=torch.float32, device=coord.device)
    with _on(coord):
        kernels.plan_kernel[(batch,)](
            coord,
            rows,
            sums,
            length,
            *coord.stride(),
            *table_shape[-3:-1],
            BICUBIC=how.mode == "bicubic",
            ALIGN_CORNERS=how.align_corners,
            AR_PRESERVING=how.ar_preserving,
            NORMS=norms,
            BLOCK=_block(length, 1024),
            H0_BLOCK=_block(table_shape[-3]),
            enable_fp_fusion=True,
        )
    return Plan(rows, sums)


def launch_forward(x: Tensor, table: Tensor, patch_coord: Tensor, plan: Plan, how: Resampling) -> None:
    """``x`` += the table, in place, outside autograd. ``x`` is not empty."""
    from . import triton_kernels as kernels

    x, table, coord = x.detach(), table.detach(), patch_coord.detach()
    table = table.reshape(table.shape[-3:]).contiguous()
    rows, cols, channels = table.shape
    # A slice of the table should stay in an SM's L1 cache, of which some is shared memory.
    width = min(64 if rows * cols * 64 * table.element_size() <= 2**17 else 32, _block(channels))
    blocks = -(-channels // width)
    splits = max(1, min(TOKENS, FORWARD_PROGRAMS // (len(x) * blocks)))
    with _on(x):
        kernels.forward_kernel[(len(x) * splits, blocks)](
            x,
            table,
            coord,
            plan.rows,
            channels,
            splits,
            *x.stride(),
            *coord.stride(),
            rows,
            cols,
            **_options(how),
            TOKENS=TOKENS,
            CELLS=min(32, _block(max(rows, cols))),
            CHANNELS=width,
            num_warps=_warps(TOKENS * width),
        )


def table_grad(g: Tensor, table_shape: torch.Size, patch_coord: Tensor, plan: Plan, how: Resampling) -> Tensor:
    """The table's gradient (H0, W0, C), float32, from that of the tokens (B, N, C)."""
    from . import triton_grad as kernels

    rows, cols, channels = table_shape[-3:]
    if g.numel() == 0:
        return g.new_zeros(rows, cols, channels, dtype=torch.float32)
    g, coord = g.detach(), patch_coord.detach()
    batch, length = g.shape[:2]
    order = torch.sort(plan.rows[:, 3], stable=True).indices
    width = min(64, max(16, 4096 // _block(cols)), _block(channels))
    blocks = -(-channels // width)
    splits = max(1, min(16, batch, -(-GRAD_PROGRAMS // (rows * blocks))))
    parts = torch.empty(splits, rows, cols, channels, dtype=torch.float32, device=g.device)
    grid = (splits * rows, blocks)
    sizes = dict(TOKENS=TOKENS, CHANNELS=width, W0_BLOCK=_block(cols))
    options = dict(_options(how), **sizes, num_warps=_warps(max(TOKENS, _block(cols)) * width))
    if g.is_cuda and torch.version.hip is None:
        # The products alone would take twice as many; what they spill is little beside the warps that fit instead.
        options["maxnreg"] = 128
    with _on(g):
        kernels.table_grad_kernel[grid](
            g, parts, plan.rows, plan.norms, order, batch, length, channels, splits, *g.stride(), rows, cols, **options
        )
        kernels.token_grad_kernel[grid](
            g,
            parts,
            coord,
            plan.rows,
            order,
            batch,
            channels,
            splits,
            *g.stride(),
            *coord.stride(),
            rows,
            cols,
            H0_BLOCK=_block(rows),
            **options,
        )
    return parts[0] if splits == 1 else parts.sum(0)


def _options(how: Resampling) -> dict[str, Any]:
    return dict(
        BICUBIC=how.mode == "bicubic",
        ANTIALIAS=how.antialias,
        ALIGN_CORNERS=how.align_corners,
        enable_fp_fusion=True,  # a later Triton turns it off by default
    )


def _block(n: int, most: int = 2**30) -> int:
    """The power of two that holds ``n``, at least 16 (the least side of a product), at most ``most``."""
    return min(most, max(16, 1 << (n - 1).bit_length()))


def _warps(values: int) -> int:
    """Warps for a block of so many values: 16 a thread, from where on Triton's products work in 4 x 4 tiles."""
    return max(1, min(8, values // 512))


def _on(tensor: Tensor) -> AbstractContextManager[Any]:
    """The context in which Triton launches where ``tensor`` is."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@lru_cache(maxsize=64)
def _agrees(device: torch.device) -> bool:
    """Whether Triton compiles and launches here (C compiler, GPU new enough) and gives the CPU's numbers.

    Tried once per device, forward and backward on a small batch; if not, that is said in a warning. It waits for the
    GPU, so a first call must not be one that a CUDA graph records.
    """
    try:
        ours, cpus = _trial(device, add_learned), _trial(torch.device("cpu"), _eager)
        if not all(torch.allclose(a, b, rtol=0, atol=2e-6 * b.abs().max().item()) for a, b in zip(ours, cpus)):
            raise RuntimeError("its results are not those of the CPU")
    except Exception as error:
        warnings.warn(
            f"timm_naflex_fast: Triton's kernels cannot serve on {device}, so matmul's other form does and waits for "
            f"the GPU once per call: {error}",
            stacklevel=6,
        )
        return False
    return True


def _trial(device: torch.device, add: Callable[[Tensor, Tensor, Tensor, Resampling], None]) -> list[Tensor]:
    """A small table resampled to two grids on ``device``, one of them in another order, and its gradient."""
    with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
        table = torch.arange(480.0).sin().view(6, 5, 16).to(device).requires_grad_()
        coord = torch.zeros(2, 12, 2, dtype=torch.int64)
        coord[0] = torch.cartesian_prod(torch.arange(3), torch.arange(4))
        coord[1, :10] = torch.cartesian_prod(torch.arange(5), torch.arange(2)).flip(0)
        x = torch.zeros(2, 12, 16, device=device)
        add(x, table, coord.to(device), Resampling())
        (grad,) = torch.autograd.grad(x.square().sum(), table)
    return [x.detach().cpu(), grad.cpu()]


def _eager(x: Tensor, table: Tensor, patch_coord: Tensor, how: Resampling) -> None:
    from .choose import add_eagerly

    add_eagerly(x, (table,), patch_coord, how, "matmul")


def operator_gradient(g: Tensor, table: Tensor, patch_coord: Tensor, how: Resampling) -> Tensor:
    """The gradient of the table, whose values are not looked at, in its dtype."""
    if g.numel() == 0:
        return torch.zeros_like(table, memory_format=torch.contiguous_format)
    patch_coord = patch_coord.to(g.device)
    plan = make_plan(patch_coord, table.shape, how, norms=True)
    return table_grad(g, table.shape, patch_coord, plan, how).to(table.dtype)
