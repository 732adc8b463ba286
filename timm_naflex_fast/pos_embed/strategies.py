"""The strategies: functions that compute the embeddings of grids from a table.

- ``matmul``: timm's result as sums of the few table rows that each cell reads; factorized tables,
  and bilinear ones without antialiasing, by timm's own calls, which cost no more.
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

from .sums import Embeddings, resample
from .table import PositionTable, ResizeSpec, Size
from .weights import interpolate


def interpolated(
    table: PositionTable, sizes: Collection[Size], spec: ResizeSpec, dtype: torch.dtype
) -> Embeddings:
    """The embeddings (h*w, C) of each size by timm's own calls of ``F.interpolate``, in float32.

    None of the sizes is a learned table's own, which timm does not resize. The embeddings of two
    tables are in ``dtype``: timm casts each before it adds them.
    """
    for size in sizes:
        h, w = size
        resized_size = spec.resized_size(h, w)
        if len(table) == 1:
            resized = interpolate(table[0].float(), resized_size, spec)
            if spec.ar_preserving:
                # A copy: what is kept would else keep the whole square in memory.
                resized = resized[:, :h, :w].clone()
            yield size, resized.reshape(h * w, -1)
            continue

        resized_lines = []
        # timm resizes a line only if its length differs, and crops it after that.
        for lines, keep, length in zip(table, size, resized_size):
            line = lines
            if lines.shape[-2] != length:
                line = interpolate(lines.float(), (length,), spec)
            resized_lines.append(line.flatten(0, -2)[:keep].to(dtype))
        y, x = resized_lines  # (h, C), (w, C)
        yield size, (y[:, None] + x).flatten(0, 1)


def exact(
    table: PositionTable, sizes: Collection[Size], spec: ResizeSpec, dtype: torch.dtype
) -> Embeddings:
    """timm's result by sums, or by its own calls where these cost less: the strategy "matmul"."""
    # Here PyTorch's kernel reads no more than the sums, and needs no steps: a new grid takes 0.4 to
    # 0.7 of the time. It computes in float32.
    has_lines = len(table) == 2
    reads_four = spec.interpolation == "bilinear" and not spec.antialias
    if dtype is not torch.float64 and (has_lines or reads_four):
        return interpolated(table, sizes, spec, torch.float32)
    return resample(table, sizes, spec, dtype)


STRATEGIES: dict[
    str, Callable[[PositionTable, Collection[Size], ResizeSpec, torch.dtype], Embeddings]
]
STRATEGIES = {"matmul": exact, "interpolate_cached": interpolated, "grid_sample": resample}
EXACT = tuple(name for name in STRATEGIES if name != "grid_sample")
"""Those with the result of timm's loop."""
