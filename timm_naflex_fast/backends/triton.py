"""The matmul strategy as Triton kernels: nothing is read back to the host, so CUDA graphs can hold it.

| launch | programs | what it does |
| --- | --- | --- |
| plan | a sample | reads the coordinates twice; says each token's cell, each grid, and which heights occur |
| strips | a (height, row) that occurs | ``A_h . P``: a row of the table for each |
| add | 32 tokens, channels | each token adds the few cells of its strip row that ``A_w`` weighs into ``x`` |
| add, direct | 32 tokens, channels | the same from the table itself: heights above 64, and 2 x 2 cells |
| sort | | the samples, by one integer for each |
| strips' gradient | a (height, row) that occurs, channels | ``g . A_w`` of all samples of that height |
| table's gradient | 16 cells of a row, channels | ``A_h^T`` of the strip rows that see them; then single tokens |

Single tokens are those of samples in another order, or of a resized height above 64.

This mirrors the CPU's form. The matrices are those of ``resampling.matrices``, kept on the device as ``bands`` (20 MB
for a 32 x 32 table), so that every weight is bit-equal to the CPU's. Blocks of channels are the slowest axis of
programs: all that run at one time share a slice of the strip rows, which stays in L2.

Never run on a GPU. Before each kind of kernel serves for the first time, it is compared with the CPU (:func:`agrees`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import tracing
from ..resampling import cache
from ..resampling.checks import check_writable
from ..resampling.matrices import ResizeSpec
from ..resampling.tokens import AddedInPlace
from ..strategies import STRATEGIES
from . import eager
from .bands import LONGEST, Bands, make_bands

DTYPES = {torch.float32, torch.bfloat16, torch.float16}
LENGTHS = (1024, 2048, LONGEST)  # bands are made for all lengths up to one of these
WIDEST = 2**18  # numbers in a line of the table: the strip rows of a wider one could take more than 2 GiB
HAS_TRITON = find_spec("triton") is not None
FUSE = {"enable_fp_fusion": True}  # newer Triton turns fused multiply-adds off unless asked
FIRST_CALL = (
    "the first call with such a table copies its resize matrices to the GPU and compares the kernels "
    "with the CPU, which no CUDA graph can record; run the model once before you capture it"
)
WRONG_HERE = (
    "Triton's kernels gave other numbers than the CPU here, and the form that runs in their place cannot be part of a "
    'CUDA graph; compile with mode="default", or call enable(mode="stock")'
)
Made = TypeVar("Made")


class BatchFacts(NamedTuple):
    """What the kernels know of a batch, on its device: see ``triton_kernels``."""

    packed_yx: Tensor
    samples: Tensor
    heights: Tensor


def serves(x: Tensor, table: Tensor, spec: ResizeSpec) -> bool:
    """Whether the kernels take this table and this ``x``: on CUDA, in half or single precision, with Triton.

    Whether they give the right numbers here, :func:`agrees` finds out where they run.
    """
    if not (x.is_cuda and HAS_TRITON and table.device == x.device and {x.dtype, table.dtype} <= DTYPES):
        return False
    rows, cols, channels = table.shape[-3:]
    too_large = max(rows, cols) > LENGTHS[0] or cols * channels > WIDEST or x.shape[1] > LENGTHS[-1]
    return not too_large and spec.sampler != "affine_grid"


def add(x: Tensor, tables: tuple[Tensor, ...], patch_coord: Tensor, spec: ResizeSpec) -> None:
    """Add the table ([1,] H0, W0, C), resampled to each sample's grid, into ``x`` (B, N, C) in place.

    Tokens may be in any order, and any of them dropped. Where the host could have raised an error, tokens become NaN,
    which :func:`lost_tokens` counts: one with a negative coordinate, and all of a sample that has a coordinate that is
    not finite, or beyond the lengths that have a matrix, which takes dropped tokens.

    Raises:
        RuntimeError: the first call with such a table, where a CUDA graph is being captured.
    """
    check_writable(x)
    (table,) = tables
    if x.numel() == 0 or not agrees(x, table.shape, spec, "in place"):
        return eager.add(x, tables, patch_coord, spec, STRATEGIES["matmul"])
    facts = read_batch(patch_coord, x.device, table.shape, spec)

    def gradients(g: Tensor) -> list[Tensor]:
        differentiable = tracing.why_unsupported(g) or (torch.is_grad_enabled() and g.requires_grad)
        if differentiable or not agrees(g, table.shape, spec, "gradient"):
            return [eager.gradient(g, table.shape[-3:], patch_coord, spec)]
        with torch.no_grad():
            return [table_grad(g, table.shape, facts, spec)]

    if torch.is_grad_enabled() and (x.requires_grad or table.requires_grad):
        AddedInPlace.apply(x, gradients, table)  # before we write: autograd may forbid it
    tokens = _aligned(x.detach())
    launch_forward(tokens, tokens, table, facts, spec)
    if tokens.data_ptr() != x.data_ptr():
        x.detach().copy_(tokens)
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)  # written to unseen: whoever saved x must hear of it


def operator_sum(x: Tensor, table: Tensor, patch_coord: Tensor, spec: ResizeSpec) -> Tensor:
    """``x`` plus the table in a new tensor; ``x`` is read once."""
    if x.numel() == 0 or not agrees(x, table.shape, spec, "copy"):
        return eager.operator_sum(x, table, patch_coord, spec)
    x = _aligned(x)
    out = torch.empty_like(x)
    launch_forward(x, out, table, read_batch(patch_coord, x.device, table.shape, spec), spec)
    return out


def operator_gradient(g: Tensor, table_shape: Sequence[int], patch_coord: Tensor, spec: ResizeSpec) -> Tensor:
    """The gradient of a table (H0, W0, C), float32."""
    shape = torch.Size(table_shape)
    if g.numel() == 0 or not agrees(g, shape, spec, "gradient"):
        return eager.gradient(g, shape, patch_coord, spec)
    return table_grad(g, shape, read_batch(patch_coord, g.device, shape, spec), spec)


def read_batch(patch_coord: Tensor, device: torch.device, table_shape: torch.Size, spec: ResizeSpec) -> BatchFacts:
    """The cells of all tokens, every sample's grid, and the heights that occur in the batch."""
    from . import triton_kernels as kernels

    coord = patch_coord.detach()
    if coord.is_floating_point():  # before the cast, which is undefined for such numbers
        coord = coord.nan_to_num(nan=kernels.HUGE.value).clamp(-1, kernels.HUGE.value)
    coord = _aligned(coord.to(device, torch.int64))
    batch, n_tokens = coord.shape[:2]
    packed_yx = torch.empty(batch, n_tokens, dtype=torch.int32, device=device)
    samples = torch.empty(batch, kernels.FACTS.value, dtype=torch.int32, device=device)
    heights = torch.zeros(2, kernels.STRIPS.value, dtype=torch.int32, device=device)
    own_size = table_shape[-3:-1] if spec.copies_own_size else (0, 0)
    facts = BatchFacts(packed_yx, samples, heights)
    with torch.cuda.device_of(coord):
        kernels.plan_kernel[batch,](
            coord,
            *facts,
            _lost(device),
            n_tokens,
            *own_size,
            _longest(n_tokens),
            spec.ar_preserving,
            spec.embeds_padding,
        )
    return facts


def launch_forward(x: Tensor, out: Tensor, table: Tensor, facts: BatchFacts, spec: ResizeSpec) -> None:
    """``out`` = ``x`` + the table, outside autograd. Both are contiguous, and may be the same tensor."""
    from . import triton_kernels as kernels

    table = _aligned(table.detach().reshape(table.shape[-3:]).float())
    (batch, n_tokens, channels), cols = x.shape, table.shape[1]
    bands = cache.pinned(_bands((table.shape[0], cols), spec, x.device, _longest(n_tokens)), x.device)
    # A token that reads 2 x 2 cells needs no strip rows, which are as long as the table is wide.
    highest = 0 if bands.most_taps == 2 and cols > kernels.BLOCK_TOKENS.value else kernels.STRIPS.value
    grid = batch * _blocks(n_tokens, kernels.BLOCK_TOKENS), (_blocks(channels, kernels.BLOCK_CHANNELS) + 3) // 4
    last = (n_tokens, cols, channels, highest)
    with torch.cuda.device_of(x):
        if highest:
            strips = _empty_strips(facts, cols, channels)
            kernels.strips_kernel[min(len(strips), 256), _blocks(cols * channels, kernels.BLOCK_SIZE)](
                table, strips, facts.heights, bands.y, bands.weights, cols, channels, **FUSE
            )
            kernels.add_kernel[grid](
                x, out, strips, *facts, bands.y, bands.x, bands.weights, *last, False, out is not x, **FUSE
            )
        kernels.add_kernel[grid](
            x, out, table, *facts, bands.y, bands.x, bands.weights, *last, True, out is not x, **FUSE
        )


def table_grad(g: Tensor, table_shape: torch.Size, facts: BatchFacts, spec: ResizeSpec) -> Tensor:
    """The table's gradient (H0, W0, C), float32, from that of the tokens (B, N, C)."""
    from . import triton_kernels as kernels

    g = _aligned(g.detach())
    (batch, n_tokens, channels), (rows, cols) = g.shape, table_shape[-3:-1]
    bands = cache.pinned(_bands((rows, cols), spec, g.device, _longest(n_tokens)), g.device)
    strips = _empty_strips(facts, cols, channels)
    by_height = torch.sort(facts.samples[:, kernels.KEY.value], stable=True).indices
    facts = facts._replace(samples=facts.samples[by_height])
    grad = torch.empty(rows, cols, channels, dtype=torch.float32, device=g.device)
    c_blocks, room = _blocks(channels, kernels.BLOCK_CHANNELS), min(len(strips), 256)
    with torch.cuda.device_of(g):
        kernels.strips_grad_kernel[min(len(strips), 512), c_blocks](
            g, strips, facts.samples, facts.heights, bands.seen_x, bands.weights, n_tokens, room, cols, channels,
            spec.embeds_padding, **FUSE,
        )  # fmt: skip
        kernels.table_grad_kernel[rows, _blocks(cols, kernels.BLOCK_COLUMNS), c_blocks](
            g, strips, grad, *facts, bands.seen_y, bands.y, bands.x, bands.weights, batch, n_tokens, room, cols,
            channels, **FUSE,
        )  # fmt: skip
    return grad


def _blocks(n: int, size: Any) -> int:
    """So many blocks of a kernel's constant ``size`` hold ``n``."""
    return -(-n // int(size.value))


def _longest(n_tokens: int) -> int:
    """The bands to take: with all tokens present, no side of a grid is longer than the tokens are many."""
    return next(longest for longest in LENGTHS if n_tokens <= longest or longest == LENGTHS[-1])


def _aligned(x: Tensor) -> Tensor:
    """``x`` contiguous, at an address for which the kernels that were tried are compiled."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


def _empty_strips(facts: BatchFacts, cols: int, channels: int) -> Tensor:
    """Room for as many (height, row) as can occur: those of the largest heights, each sample with another."""
    most = facts.heights.shape[1]
    few = min(len(facts.samples), most)
    rows = few * most - few * (few - 1) // 2
    return torch.empty(rows, cols, channels, dtype=torch.float32, device=facts.heights.device)


_lost_on: dict[torch.device, Tensor] = {}
_agreed: dict[tuple[Any, ...], bool] = {}


@cache.cached("bands")
def _bands(size: tuple[int, int], spec: ResizeSpec, device: torch.device, longest: int) -> Bands:
    return _outside_pools(device, lambda: make_bands(size, spec, longest).to(device))


def _lost(device: torch.device) -> Tensor:
    """A counter on the device: the tokens that became NaN."""
    if device not in _lost_on:
        # A copy, which is waited for: another stream than the thread's may be the first to count.
        zero = torch.zeros(1, dtype=torch.int32, device="cpu")
        _lost_on[device] = _outside_pools(device, lambda: zero.to(device, copy=True))
    return _lost_on[device]


def lost_tokens() -> int:
    """How many tokens became NaN so far, because they name no cell (see :func:`add`); waits for the devices."""
    with cache.no_modes():  # ``status()`` may be asked under a FakeTensorMode, whose tensors have no numbers
        return sum(int(count.item()) for count in _lost_on.values())


def _outside_pools(device: torch.device, make: Callable[[], Made]) -> Made:
    """``make()`` in a thread of its own: what it allocates belongs to no memory pool of the caller's.

    The first run of ``torch.compile(mode="reduce-overhead")`` takes all memory from its graphs' pool, and must find
    that nothing of it stays in use.

    Raises:
        RuntimeError: a CUDA graph is being captured.
    """
    tracing.refuse_in_cuda_graph(device, FIRST_CALL)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


def agrees(like: Tensor, table_shape: torch.Size, spec: ResizeSpec, kind: str) -> bool:
    """Whether the kernels give the CPU's numbers: tried once for each device, dtype, table shape, spec and ``kind``.

    ``kind``: "in place", "copy" or "gradient", each a kernel of its own. The trial takes the very kernels that will
    run, on five small samples, so it compiles nothing that is not needed. It waits for the GPU.

    Raises:
        RuntimeError: while a CUDA graph is captured, what was not tried, or does not agree.
    """
    key = like.device, like.dtype, torch.Size(table_shape[-3:]), spec, kind
    if key not in _agreed:
        try:
            _agreed[key] = _outside_pools(like.device, lambda: _try(*key))
        except torch.cuda.OutOfMemoryError:  # says nothing about the kernels: the next call tries again
            return False
    if not _agreed[key]:
        tracing.refuse_in_cuda_graph(like.device, WRONG_HERE)
    return _agreed[key]


def _try(device: torch.device, dtype: torch.dtype, shape: torch.Size, spec: ResizeSpec, kind: str) -> bool:
    """Five samples, padded, in another order, too high for strip rows, whole, cut short: here and on the CPU."""
    grids, numbers = ((5, 9), (9, 5), (70, 1), (8, 12), (12, 9)), torch.Generator("cpu").manual_seed(0)
    coord = torch.zeros(5, 96, 2, dtype=torch.int64, device="cpu")
    for sample, (h, w) in zip(coord, grids):
        cell = torch.arange(min(h * w, 96), device="cpu")
        sample[: len(cell)] = torch.stack((cell // w, cell % w), 1)
    coord[1, :6] = coord[1, :6].flip(0)
    table = torch.randn(shape, generator=numbers, device="cpu")
    x = torch.randn(*coord.shape[:2], shape[2], generator=numbers, device="cpu").to(dtype)
    try:
        facts = read_batch(coord, device, shape, spec)
        if kind == "gradient":
            want = eager.gradient(x, shape, coord, spec)
            got = table_grad(x.to(device), shape, facts, spec).cpu()
            near = bool((got - want).abs().max() <= 1e-5 * want.abs().max())
        else:
            want, given = x.clone(), x.to(device)
            eager.add(want, (table,), coord, spec, STRATEGIES["matmul"])
            out = given if kind == "in place" else torch.full_like(given, torch.nan)
            launch_forward(given, out, table.to(device), facts, spec)
            apart = (out.cpu().float() - want.float()).abs()
            # In half precision a sum in a hundred may round to the other side: the float32 sums differ in a last bit.
            most = 2e-6 * max(1.0, table.abs().max().item()) if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
            near = bool((apart <= most).all()) and (dtype == torch.float32 or (apart > 0).float().mean().item() <= 0.01)
        if not near:
            raise RuntimeError("its results are not those of the CPU")
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        warnings.warn(
            f"timm_naflex_fast: Triton's kernels cannot serve on {device}, so matmul's other form does and waits for "
            f"the GPU once per call: {error}",
            stacklevel=2,
        )
        return False
    return True
