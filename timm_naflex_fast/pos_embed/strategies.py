"""The strategies: functions that compute the embeddings of grids from a table.

- ``matmul``: timm's result as sums of the few table rows that each cell reads; one small grid
  of a bilinear table without antialiasing by timm's own call, which costs less.
- ``interpolate_cached``: timm's own ``F.interpolate`` calls, once for each distinct grid. On a CPU
  its forward pass is bit-identical to timm's: the same calls on the same tensors. It gains in the
  backward pass. timm adds into slices of ``x``, and for each slice autograd copies the whole
  gradient.
- ``grid_sample``: the result of timm's ``pos_embed_use_grid_sample``, by the sums of ``matmul``,
  with weights of ``F.grid_sample`` at timm's positions (``formula.py``). Its specs have ``samples``.

Each is called as ``(table, sizes, spec, dtype)``. It gives each size with the embeddings (h*w, C) of
its grid, one at a time if possible, for tokens of ``dtype``, to which they are cast later. Eager code
calls it, also inside the compiled operator; other graphs compute the same result by ``formula.py``.
The gradient needs no strategy: it is ``sums.gradient``, one for all.

Tests: tests/contract/test_backends.py.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from .sums import Embeddings, added_lines, resample
from .table import PositionTable, ResizeSpec, Size
from .weights import interpolate

MAX_INTERPOLATED = 2**19  # numbers of one grid's embeddings: up to here PyTorch's kernel costs less


def interpolated(
    table: PositionTable, sizes: Collection[Size], spec: ResizeSpec, dtype: torch.dtype
) -> Embeddings:
    """The embeddings (h*w, C) of each size by timm's own calls of ``F.interpolate``, in float32.

    None of the sizes is a learned table's own, which timm does not resize. The embeddings of two
    tables are in ``dtype``: timm casts each before it adds them.
    """
    if len(table) == 2:

        def resized(lines: Tensor, length: int) -> Tensor:
            of_length = interpolate(lines.float(), (length,), spec)[0]
            # It comes channel after channel, and so would a sum of such lines, which takes 3 times as
            # long to add to tokens.
            return of_length.to(dtype).contiguous()

        tables = [lines.flatten(0, -2) for lines in table]
        yield from added_lines(tables, sizes, spec, dtype, resized)
        return
    for size in sizes:
        h, w = size
        cells = interpolate(table[0].float(), spec.resized_size(h, w), spec)
        if spec.ar_preserving:
            # A copy: what is kept would else keep the whole square in memory.
            cells = cells[:, :h, :w].clone()
        yield size, cells.reshape(h * w, -1)


def exact(
    table: PositionTable, sizes: Collection[Size], spec: ResizeSpec, dtype: torch.dtype
) -> Embeddings:
    """timm's result by sums, or by its own call where that costs less: the strategy "matmul"."""
    # Here PyTorch's kernel reads no more than the sums, and needs no steps: a new grid takes 0.4 to
    # 0.55 of the time. But it runs in one thread, in float32: many cells take 1.5 times as long.
    reads_four = spec.interpolation == "bilinear" and not spec.antialias
    if reads_four and dtype is not torch.float64 and len(sizes) == 1:
        ((h, w),) = sizes
        if h * w * table[0].shape[-1] <= MAX_INTERPOLATED:
            return interpolated(table, sizes, spec, dtype)
    return resample(table, sizes, spec, dtype)


STRATEGIES: dict[
    str, Callable[[PositionTable, Collection[Size], ResizeSpec, torch.dtype], Embeddings]
]
STRATEGIES = {"matmul": exact, "interpolate_cached": interpolated, "grid_sample": resample}
EXACT = tuple(name for name in STRATEGIES if name != "grid_sample")
"""Those with the result of timm's loop."""
