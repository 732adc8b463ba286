"""The matmul strategy as Triton kernels: nothing is read back to the host, so CUDA graphs can hold it.

| launch | programs | what it does |
| --- | --- | --- |
| plan | a sample | reads the coordinates twice; says each sample's grid, marks the heights that occur |
| strips | a (height, row) that occurs | ``A_h . P``: a row of the table for each |
| add | a sample, C-block | each token reads the few cells of its strip that ``A_w`` weighs, adds them into ``x`` |
| sort | | one integer for each sample |
| strips' gradient | a (height, row) that occurs, C-block | ``g . A_w`` of all samples of that height |
| table's gradient | a row of the table | ``A_h^T`` of the strips that see it |
| tokens' gradient | a row of the table, C-block | samples in another order, or higher than 64: token by token |

This mirrors the CPU's form. The matrices are those of ``resampling.matrices``, made on the CPU once for every length up
to 1,024 and kept on the device as bands (20 MB for a 32 x 32 table), so that every weight is bit-equal to the CPU's.
Products with the zeros of a matrix are never made. The C-block is the slowest axis of programs: all that run at one
time share a slice of the strips, which stays in L2, and the line of tokens at hand stays in L1. Gradients take no
atomics: each program adds what it owns in one order.

Predicted, never measured (no GPU was at hand), for an H100 or H200: 132 SMs at 1.7 GHz and 65 % of their peak issue
rate (583 G warp instructions a second), 3.0 TB/s, 5.5 TB/s from L2. B=512, C=768, forward, in milliseconds; counted in
the machine code for sm_90 (triton 3.9; 93 registers in float32, 70 in bfloat16, no spills):

| work | taps a token | add: instructions, bytes | strips | forward, one plain add (target 1.3 of it) |
| --- | --- | --- | --- | --- |
| diverse float32 | 6.8 | 200 M 0.34, 0.98 GB 0.33 | 0.07 | 0.41, 1.01 |
| diverse bfloat16 | 6.8 | 160 M 0.28, 0.49 GB 0.16 | 0.07 | 0.35, 0.50 |
| siglip float32 | 2.1 | 112 M 0.19, 0.79 GB 0.26 | 0.02 | 0.28, 0.27 |
| siglip bfloat16 | 2.1 | 92 M 0.16, 0.39 GB 0.13 | 0.02 | 0.18, 0.13: **missed** |
| radio float32 | 2.0 | 459 M 0.79, 3.2 GB 1.08 | 0.30 | 1.4, 2.4 |
| radio bfloat16 | 2.0 | 380 M 0.65, 1.6 GB 0.54 | 0.30 | 0.95, 1.2 |

| work | strips' gradient: instructions, bytes | table's gradient | forward + backward, add + read (target 1.5) |
| --- | --- | --- | --- |
| diverse float32 | 208 M 0.36, 0.49 GB 0.16 | 0.06 | 0.83, 1.51 |
| diverse bfloat16 | 185 M 0.32, 0.24 GB 0.08 | 0.06 | 0.73, 0.76 |
| siglip float32 | 91 M 0.16, 0.39 GB 0.13 | 0.01 | 0.45, 0.40 |
| siglip bfloat16 | 80 M 0.14, 0.20 GB 0.07 | 0.01 | 0.33, 0.20: **missed** |
| radio float32 | 719 M 1.23, 1.6 GB 0.54 | 0.29 | 2.9, 3.5 |
| radio bfloat16 | 631 M 1.08, 0.8 GB 0.27 | 0.29 | 2.3, 1.8 |

What misses is bound by instructions about each token, not by sums: let one tile take several samples of one grid.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..resampling import cache
from ..resampling.matrices import Resampling, axis_matrix
from ..resampling.tokens import AddedInPlace, check_writable, unusual

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST = 1024  # of the lengths that have a matrix: tokens of a longer grid become NaN
STRIPS = 64  # the largest resized height that has strips
STRIPS_BYTES = 2**28  # larger strips are made for some channels at a time
PROGRAMS = 2**14  # enough to fill a GPU several times over
TOKENS = 32  # at a time
HAS_TRITON = find_spec("triton") is not None


class Plan(NamedTuple):
    """What the kernels know of a batch, on its device: see ``triton_kernels``."""

    samples: Tensor
    keys: Tensor
    heights: Tensor


class Bands(NamedTuple):
    """Resize matrices of every length, as bands of their rows (see ``triton_kernels``); ``widest`` band by length."""

    rows: Tensor
    weights: Tensor
    widest: Tensor


def serves(x: Tensor, table: Tensor, how: Resampling) -> bool:
    """Whether the kernels can add this table into this ``x``: on CUDA, in half or single precision, with Triton."""
    if not (HAS_TRITON and x.is_cuda and table.device == x.device) or how.sampler == "affine_grid":
        return False
    if x.dtype not in DTYPES or table.dtype not in DTYPES or max(table.shape[-3:-1]) > LONGEST:
        return False
    return torch.compiler.is_compiling() or _agrees(x.device)


def add_learned(x: Tensor, table: Tensor, patch_coord: Tensor, how: Resampling) -> None:
    """Add the table ([1,] H0, W0, C), resampled to each sample's grid, into ``x`` (B, N, C) in place.

    Tokens may be in any order, and any of them dropped. Where the host could have raised an error, tokens become NaN:
    one with a negative coordinate, and all of a sample that has a coordinate beyond 1,023 or not finite.

    Raises:
        RuntimeError: the first call with such a table, where a CUDA graph is being captured.
    """
    check_writable(x)
    if x.numel() == 0:
        return
    patch_coord = patch_coord.to(x.device)
    plan = make_plan(patch_coord, table.shape, how)

    launch_forward(x, table, patch_coord, plan, how)

    def gradients(g: Tensor) -> list[Tensor]:
        if unusual(g) or (torch.is_grad_enabled() and g.requires_grad):
            from .choose import gradient_eagerly  # PyTorch can differentiate and batch its products

            return [gradient_eagerly(g, table.shape[-3:], patch_coord, how)]
        with torch.no_grad():
            return [table_grad(g, table.shape, patch_coord, plan, how)]

    if torch.is_grad_enabled() and table.requires_grad:
        AddedInPlace.apply(x, gradients, table)
    elif torch.is_grad_enabled() and x.requires_grad:
        AddedInPlace.apply(x, None)


def make_plan(patch_coord: Tensor, table_shape: torch.Size, how: Resampling) -> Plan:
    """Every sample's grid, and the heights that occur in the batch."""
    from . import triton_kernels as kernels

    batch, length = patch_coord.shape[:2]
    coord = patch_coord.detach()
    (along_y, _), (along_x, seen_x) = _both_bands(table_shape, how, coord.device)
    samples = torch.empty(batch, kernels.PLAN.value, dtype=torch.int32, device=coord.device)
    keys = torch.empty(batch, dtype=torch.int32, device=coord.device)
    heights = torch.zeros(2, STRIPS, dtype=torch.int32, device=coord.device)
    with _on(coord):
        kernels.plan_kernel[(batch,)](
            coord,
            samples,
            keys,
            heights,
            along_y.widest,
            along_x.widest,
            seen_x.widest,
            length,
            *coord.stride(),
            *table_shape[-3:-1],
            AR_PRESERVING=how.ar_preserving,
            PADDING=how.sampler != "interpolate",
            LONGEST=LONGEST,
            STRIPS=STRIPS,
            BLOCK=_block(length, 1024),
        )
    return Plan(samples, keys, heights)


def launch_forward(
    x: Tensor, table: Tensor, patch_coord: Tensor, plan: Plan, how: Resampling, out: Tensor | None = None
) -> None:
    """``out`` = ``x`` + the table, outside autograd; in place without ``out``. ``x`` is not empty."""
    from . import triton_kernels as kernels

    x, table, coord = x.detach(), table.detach().reshape(table.shape[-3:]), patch_coord.detach()
    (along_y, _), (along_x, _) = _both_bands(table.shape, how, x.device)
    most = _most_strips(len(x))
    for part in _channel_parts(table.shape, most):
        x_part, out_part = x[..., part], (x if out is None else out)[..., part]
        rows, cols, channels = table[..., part].shape
        strips = torch.empty(most + rows, cols, channels, dtype=torch.float32, device=x.device)
        strips[most:] = table[..., part]
        width, block = cols * channels, _block(cols * channels, 1024)
        c_block = _block(channels, 64)
        c_blocks = -(-channels // (4 * c_block))
        splits = max(1, min(-(-x.shape[1] // TOKENS), PROGRAMS // (len(x) * c_blocks)))
        with _on(x):
            kernels.strips_kernel[(min(most, 256), -(-width // block))](
                strips, plan.heights, *along_y[:2], most, width, STRIPS=STRIPS, TAPS=4, BLOCK=block, **FUSE
            )
            kernels.add_kernel[(len(x) * splits, c_blocks)](
                x_part, out_part, strips, coord, plan.samples, plan.heights, *along_y[:2], *along_x[:2], x.shape[1],
                channels, splits, most, *x_part.stride(), *out_part.stride(), *coord.stride(), W0=cols,
                COPY=out is not None, STRIPS=STRIPS, TAPS=2, TOKENS=TOKENS, CHANNELS=c_block, **FUSE,
            )  # fmt: skip


def table_grad(g: Tensor, table_shape: torch.Size, patch_coord: Tensor, plan: Plan, how: Resampling) -> Tensor:
    """The table's gradient (H0, W0, C), float32, from that of the tokens (B, N, C)."""
    from . import triton_grad as kernels

    rows, cols, channels = table_shape[-3:]
    grad = g.new_empty(rows, cols, channels, dtype=torch.float32)
    if g.numel() == 0:
        return grad.zero_()
    g, coord = g.detach(), patch_coord.detach()
    (along_y, seen_y), (along_x, seen_x) = _both_bands(table_shape, how, g.device)
    samples = plan.samples[torch.sort(plan.keys, stable=True).indices]
    most = _most_strips(len(g))
    for part in _channel_parts(table_shape, most):
        g_part = g[..., part]
        channels = g_part.shape[-1]
        strips = torch.empty(most, cols, channels, dtype=torch.float32, device=g.device)
        out = torch.empty(rows, cols, channels, dtype=torch.float32, device=g.device)
        width, block = cols * channels, _block(cols * channels, 1024)
        cells, c_block = _block(cols, 32), _block(channels, 64)
        blocks, c_blocks = -(-cols // cells), -(-channels // c_block)
        with _on(g):
            kernels.strips_grad_kernel[(min(most * blocks, 512), c_blocks)](
                g_part, strips, samples, plan.heights, *seen_x[:2], *along_x[:2], g.shape[1], channels,
                *g_part.stride(), W0=cols, PADDING=how.sampler != "interpolate", STRIPS=STRIPS, TAPS=2, CELLS=cells,
                CHANNELS=c_block, **FUSE,
            )  # fmt: skip
            kernels.table_grad_kernel[(rows, -(-width // block))](
                strips, out, plan.heights, *seen_y[:2], rows, width, STRIPS=STRIPS, TAPS=4, BLOCK=block, **FUSE
            )
            kernels.token_grad_kernel[(rows * blocks, c_blocks)](
                g_part, out, coord, samples, plan.heights, *along_y[:2], *along_x[:2], len(g), channels,
                *g_part.stride(), *coord.stride(), W0=cols, STRIPS=STRIPS, TOKENS=TOKENS, CELLS=cells,
                CHANNELS=c_block, **FUSE,
            )  # fmt: skip
        grad[..., part] = out
    return grad


FUSE = {"enable_fp_fusion": True}  # a later Triton turns it off by default


def _most_strips(batch: int) -> int:
    """So many (height, row) can occur at most: those of the ``batch`` largest heights."""
    few = min(batch, STRIPS)
    return few * STRIPS - few * (few - 1) // 2


def _channel_parts(table_shape: torch.Size, most: int) -> Iterator[slice]:
    """Slices of the channels, the strips of each at most STRIPS_BYTES."""
    rows, cols, channels = table_shape[-3:]
    size = max(64, STRIPS_BYTES // (4 * (most + rows) * cols) // 64 * 64)
    return (slice(start, min(start + size, channels)) for start in range(0, channels, size))


def _both_bands(
    table_shape: torch.Size, how: Resampling, device: torch.device
) -> tuple[tuple[Bands, Bands], tuple[Bands, Bands]]:
    """The bands of ``A_n`` and of ``A_n^T`` of either axis: y, then x."""
    how = replace(how, ar_preserving=False)
    return _bands(table_shape[-3], how, device, LONGEST), _bands(table_shape[-2], how, device, LONGEST)


@cache.kept("bands")
def _bands(n0: int, how: Resampling, device: torch.device, longest: int) -> tuple[Bands, Bands]:
    """The bands of ``A_n`` and of ``A_n^T``, for an axis of ``n0`` cells and every n up to ``longest``."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "timm_naflex_fast: the first call with such a table copies its resize matrices to the GPU, which no CUDA "
            "graph can record; run the model once before you capture it"
        )
    matrices = [axis_matrix(0, n, n, n0, how) for n in range(1, longest + 1)]
    return _pack(matrices, device), _pack([matrix.t() for matrix in matrices], device)


def _pack(matrices: list[Tensor], device: torch.device) -> Bands:
    firsts, counts, weights = [], [], []
    for matrix in matrices:
        nonzero = (matrix != 0).to(torch.uint8)
        first = nonzero.argmax(1)
        end = (matrix.shape[1] - nonzero.flip(1).argmax(1)) * nonzero.amax(1)
        column = torch.arange(matrix.shape[1], device="cpu")
        weights.append(matrix[(column >= first[:, None]) & (column < end[:, None])])
        firsts.append(first)
        counts.append((end - first).clamp(min=0))
    first, count = torch.cat(firsts), torch.cat(counts)
    rows = (count.cumsum(0) - count) << 32 | first << 16 | count
    widest = torch.stack([count.max() for count in counts]).to(torch.int32)
    return Bands(*(kept.to(device) for kept in (rows, torch.cat(weights), widest)))


def _block(n: int, most: int = 2**30) -> int:
    """The power of two that holds ``n``, at least 16 (the least side of a product), at most ``most``."""
    return min(most, max(16, 1 << (n - 1).bit_length()))


def _on(tensor: Tensor) -> AbstractContextManager[Any]:
    """The context in which Triton launches where ``tensor`` is."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


_agreed: dict[torch.device, bool] = {}


def _agrees(device: torch.device) -> bool:
    """Whether Triton compiles and launches here (C compiler, GPU new enough) and gives the CPU's numbers.

    Tried once per device, forward and backward on a small batch; if not, that is said in a warning. It waits for the
    GPU, so it is put off while a CUDA graph is captured.
    """
    if device not in _agreed:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return True
        _agreed[device] = _try(device)
    return _agreed[device]


def _try(device: torch.device) -> bool:
    try:
        ours, cpus = _trial(device, add_learned), _trial(torch.device("cpu"), _eager)
        if not all(torch.allclose(a, b, rtol=0, atol=2e-6 * b.abs().max().item()) for a, b in zip(ours, cpus)):
            raise RuntimeError("its results are not those of the CPU")
    except Exception as error:
        warnings.warn(
            f"timm_naflex_fast: Triton's kernels cannot serve on {device}, so matmul's other form does and waits for "
            f"the GPU once per call: {error}",
            stacklevel=7,
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
    from .choose import add

    add(x, (table,), patch_coord, how)


def operator_sum(x: Tensor, table: Tensor, patch_coord: Tensor, how: Resampling) -> Tensor:
    """``x`` plus the table in a new tensor; ``x`` is read once."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() > 0:
        patch_coord = patch_coord.to(x.device)
        launch_forward(x, table, patch_coord, make_plan(patch_coord, table.shape, how), how, out)
    return out


def operator_gradient(g: Tensor, table: Tensor, patch_coord: Tensor, how: Resampling) -> Tensor:
    """The gradient of the table, whose values are not looked at, in its dtype."""
    if g.numel() == 0:
        return torch.zeros_like(table, memory_format=torch.contiguous_format)
    patch_coord = patch_coord.to(g.device)
    plan = make_plan(patch_coord, table.shape, how)
    return table_grad(g, table.shape, patch_coord, plan, how).to(table.dtype)
