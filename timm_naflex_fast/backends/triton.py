"""The matmul strategy as Triton kernels: nothing is read back to the host, so CUDA graphs can hold it.

| launch | programs | what it does |
| --- | --- | --- |
| plan | a sample | reads the coordinates twice; says each token's cell, each grid, and which heights occur |
| strips | a (height, row) that occurs | ``A_h . P``: a row of the table for each |
| add | 32 tokens, C-block | each token reads the few cells of its strip that ``A_w`` weighs, adds them into ``x`` |
| sort | | the plan, by one integer for each sample |
| strips' gradient | a (height, row) that occurs, C-block | ``g . A_w`` of all samples of that height |
| table's gradient | 16 cells of a row, C-block | ``A_h^T`` of the strips that see them; then single tokens |

Single tokens are those of samples in another order, or of a resized height above 64.

This mirrors the CPU's form. The matrices are those of ``resampling.matrices``, made on the CPU once for every length up
to 1,024 and kept on the device as bands (20 MB for a 32 x 32 table), so that every weight is bit-equal to the CPU's.
Products with the zeros of a matrix are never made. The C-block is the slowest axis of programs: all that run at one
time share a slice of the strips, which stays in L2, and the line of tokens at hand stays in L1. Gradients take no
atomics: each program adds what it owns in one order.

No GPU was at hand, so no time is known. Compiled for compute capability 9.0 (triton 3.9), no kernel spills registers;
add takes 108 of them in float32 (72 in bfloat16), strips' gradient 95 (64), table's gradient 64 (56), and the loads and
stores of tokens are 16 bytes wide.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..resampling import cache
from ..resampling.checks import check_writable
from ..resampling.matrices import ResizeSpec, axis_matrix
from ..resampling.tokens import AddedInPlace
from ..tracing import why_unsupported

DTYPES = {torch.float32, torch.bfloat16, torch.float16}
LONGEST = 1024  # of the lengths that have a matrix: tokens of a longer grid become NaN
WIDEST = 2**18  # numbers in a line of the table: the strips of a wider one could take more than 2 GiB
HAS_TRITON = find_spec("triton") is not None
FUSE = {"enable_fp_fusion": True}  # newer Triton turns fused multiply-adds off unless asked


class Plan(NamedTuple):
    """What the kernels know of a batch, on its device: see ``triton_kernels``."""

    cells: Tensor
    samples: Tensor
    heights: Tensor


class Bands(NamedTuple):
    """The bands (see ``triton_kernels``) of ``A_h``, ``A_w``, ``A_h^T`` and ``A_w^T`` for all lengths."""

    y: Tensor
    x: Tensor
    seen_y: Tensor
    seen_x: Tensor
    weights: Tensor


def serves(x: Tensor, table: Tensor, how: ResizeSpec) -> bool:
    """Whether the kernels can add this table into this ``x``: on CUDA, in half or single precision, with Triton."""
    rows, cols, channels = table.shape[-3:]
    if not (HAS_TRITON and x.is_cuda and table.device == x.device and {x.dtype, table.dtype} <= DTYPES):
        return False
    if how.sampler == "affine_grid" or max(rows, cols) > LONGEST or cols * channels > WIDEST:
        return False
    return torch.compiler.is_dynamo_compiling() or _agrees(x.device)


def add_learned(x: Tensor, table: Tensor, patch_coord: Tensor, how: ResizeSpec) -> None:
    """Add the table ([1,] H0, W0, C), resampled to each sample's grid, into ``x`` (B, N, C) in place.

    Tokens may be in any order, and any of them dropped. Where the host could have raised an error, tokens become NaN:
    one with a negative coordinate, and all of a sample that has a coordinate beyond 1,023 or not finite.

    Raises:
        RuntimeError: the first call with such a table, where a CUDA graph is being captured.
    """
    check_writable(x)
    if x.numel() == 0:
        return
    plan = make_plan(patch_coord, x.device, table.shape, how)
    tokens = x.detach().contiguous()
    launch_forward(tokens, tokens, table, plan, how)
    if not x.is_contiguous():
        x.detach().copy_(tokens)

    def gradients(g: Tensor) -> list[Tensor]:
        if why_unsupported(g) or (torch.is_grad_enabled() and g.requires_grad):
            from .eager import gradient  # PyTorch can differentiate and batch its products

            return [gradient(g, table.shape[-3:], patch_coord, how)]
        with torch.no_grad():
            return [table_grad(g, table.shape, plan, how)]

    if torch.is_grad_enabled() and (x.requires_grad or table.requires_grad):
        AddedInPlace.apply(x, gradients, table)


def add(x: Tensor, tables: tuple[Tensor, ...], patch_coord: Tensor, spec: ResizeSpec) -> None:
    """As ``add_learned``."""
    add_learned(x, tables[0], patch_coord, spec)


def operator_sum(x: Tensor, table: Tensor, patch_coord: Tensor, how: ResizeSpec) -> Tensor:
    """``x`` plus the table in a new tensor; ``x`` is read once."""
    x = x.contiguous()
    out = torch.empty_like(x)
    launch_forward(x, out, table, make_plan(patch_coord, x.device, table.shape, how), how)
    return out


def operator_gradient(g: Tensor, table_shape: Sequence[int], patch_coord: Tensor, spec: ResizeSpec) -> Tensor:
    """The gradient of a table (H0, W0, C), float32."""
    shape = torch.Size(table_shape)
    return table_grad(g, shape, make_plan(patch_coord, g.device, shape, spec), spec)


def make_plan(patch_coord: Tensor, device: torch.device, table_shape: torch.Size, how: ResizeSpec) -> Plan:
    """The cells of all tokens, every sample's grid, and the heights that occur in the batch."""
    from . import triton_kernels as kernels

    coord = patch_coord.detach()
    if coord.is_floating_point():  # before the cast, which is undefined for such numbers
        coord = coord.nan_to_num(nan=kernels.HUGE.value).clamp(-1, kernels.HUGE.value)
    coord = coord.to(device, torch.int64).contiguous()
    batch, length = coord.shape[:2]
    cells = torch.empty(batch, length, dtype=torch.int32, device=device)
    samples = torch.empty(batch, kernels.PLAN.value, dtype=torch.int32, device=device)
    heights = torch.zeros(2, kernels.STRIPS.value, dtype=torch.int32, device=device)
    pads = how.sampler != "interpolate"
    own_size = (0, 0) if pads else table_shape[-3:-1]  # a sampler resizes to the table's own size too
    plan = Plan(cells, samples, heights)
    with torch.cuda.device_of(coord):
        kernels.plan_kernel[batch,](coord, *plan, length, *own_size, LONGEST, how.ar_preserving, pads)
    return plan


def launch_forward(x: Tensor, out: Tensor, table: Tensor, plan: Plan, how: ResizeSpec) -> None:
    """``out`` = ``x`` + the table, outside autograd. Both are contiguous, and may be the same tensor."""
    from . import triton_kernels as kernels

    table = table.detach().reshape(table.shape[-3:]).float().contiguous()
    (batch, length, channels), cols = x.shape, table.shape[1]
    bands, strips = _bands(table.shape[:2], how, x.device, LONGEST), _empty_strips(plan, cols, channels)
    with torch.cuda.device_of(x):
        kernels.strips_kernel[min(len(strips), 256), _blocks(cols * channels, kernels.BLOCK)](
            table, strips, plan.heights, bands.y, bands.weights, cols * channels, **FUSE
        )
        kernels.add_kernel[batch * _blocks(length, kernels.TOKENS), (_blocks(channels, kernels.CHANNELS) + 3) // 4](
            x, out, table, strips, *plan, bands.y, bands.x, bands.weights, length, channels, cols, out is not x, **FUSE
        )


def table_grad(g: Tensor, table_shape: torch.Size, plan: Plan, how: ResizeSpec) -> Tensor:
    """The table's gradient (H0, W0, C), float32, from that of the tokens (B, N, C)."""
    from . import triton_kernels as kernels

    g = g.detach().contiguous()
    (batch, length, channels), (rows, cols) = g.shape, table_shape[-3:-1]
    bands, strips = _bands((rows, cols), how, g.device, LONGEST), _empty_strips(plan, cols, channels)
    plan = plan._replace(samples=plan.samples[torch.sort(plan.samples[:, 0], stable=True).indices])
    grad = torch.empty(rows, cols, channels, dtype=torch.float32, device=g.device)
    pads, c_blocks = how.sampler != "interpolate", _blocks(channels, kernels.CHANNELS)
    with torch.cuda.device_of(g):
        kernels.strips_grad_kernel[min(len(strips), 512), c_blocks](
            g, strips, plan.samples, plan.heights, bands.seen_x, bands.weights, length, channels, cols, pads, **FUSE
        )
        kernels.table_grad_kernel[rows, _blocks(cols, kernels.COLUMNS), c_blocks](
            g, strips, grad, *plan, bands.seen_y, bands.y, bands.x, bands.weights, batch, length, channels, cols, **FUSE
        )
    return grad


def _blocks(n: int, size: Any) -> int:
    """So many blocks of a kernel's constant ``size`` hold ``n``."""
    return -(-n // int(size.value))


def _empty_strips(plan: Plan, cols: int, channels: int) -> Tensor:
    """Room for as many (height, row) as can occur: those of the largest heights, each sample with another."""
    most = plan.heights.shape[1]
    few = min(len(plan.samples), most)
    strips = few * most - few * (few - 1) // 2
    return torch.empty(strips, cols, channels, dtype=torch.float32, device=plan.heights.device)


@cache.cached("bands")
def _bands(size: tuple[int, int], how: ResizeSpec, device: torch.device, longest: int) -> Bands:
    """The bands for a table (H0, W0) and every length up to ``longest``."""
    if _in_cuda_graph(device):
        raise RuntimeError(
            "timm_naflex_fast: the first call with such a table copies its resize matrices to the GPU, which no CUDA "
            "graph can record; run the model once before you capture it"
        )
    axes = range(1 if size[0] == size[1] else 2)  # the axes of a square table share their matrices
    sides = [[axis_matrix(axis, n, n, size[axis], how) for n in range(1, longest + 1)] for axis in axes]
    sides += [[matrix.t() for matrix in side] for side in sides]
    packed, weights, start = [], [], 0
    for side in sides:
        bands = []
        for matrix in side:
            column = torch.arange(matrix.shape[1], device="cpu")
            first = torch.where(matrix != 0, column, matrix.shape[1]).amin(1)
            end = torch.where(matrix != 0, column + 1, 0).amax(1)
            count = (end - first).clamp(min=0)
            begin = start + count.cumsum(0) - count
            bands.append(count.max() << 52 | begin << 24 | first << 12 | count)
            weights.append(matrix[(column >= first[:, None]) & (column < end[:, None])])
            start += len(weights[-1])
        packed.append(torch.cat(bands).to(device))
    seen = len(axes)
    return Bands(packed[0], packed[seen - 1], packed[seen], packed[-1], torch.cat(weights).to(device))


def _in_cuda_graph(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, in which nothing can be copied from or to the host."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_agreed: dict[torch.device, bool] = {}


def _agrees(device: torch.device) -> bool:
    """Whether Triton compiles and launches here (C compiler, GPU new enough) and gives the CPU's numbers.

    Tried once per device. The trial waits for the GPU, so it is put off while a CUDA graph is captured.
    """
    if device not in _agreed and not _in_cuda_graph(device):
        _agreed[device] = _try(device)
    return _agreed.get(device, True)


def _try(device: torch.device) -> bool:
    """A small table resampled to two grids, one of them in another order, and its gradient: here and on the CPU."""
    from ..strategies import STRATEGIES
    from . import eager

    def on_cpu(x: Tensor, table: Tensor, patch_coord: Tensor, how: ResizeSpec) -> None:
        eager.add(x, (table,), patch_coord, how, STRATEGIES["matmul"])

    results = []
    try:
        with torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
            coord = torch.zeros(2, 12, 2, dtype=torch.int64)
            coord[0] = torch.cartesian_prod(torch.arange(3), torch.arange(4))
            coord[1, :10] = torch.cartesian_prod(torch.arange(5), torch.arange(2)).flip(0)
            for place, add in ((device, add_learned), (torch.device("cpu"), on_cpu)):
                table = torch.arange(480.0).sin().view(6, 5, 16).to(place).requires_grad_()
                x = torch.zeros(2, 12, 16, device=place)
                add(x, table, coord.to(place), ResizeSpec())
                results.append((x.detach().cpu(), torch.autograd.grad(x.square().sum(), table)[0].cpu()))
        if not all(torch.allclose(a, b, rtol=0, atol=2e-6 * b.abs().max().item()) for a, b in zip(*results)):
            raise RuntimeError("its results are not those of the CPU")
    except Exception as error:
        warnings.warn(
            f"timm_naflex_fast: Triton's kernels cannot serve on {device}, so matmul's other form does and waits for "
            f"the GPU once per call: {error}",
            stacklevel=7,
        )
        return False
    return True
