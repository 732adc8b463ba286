"""Position tables: one table of cells, or two tables of lines, which are one table as well.

Resizing takes means: the weights of a row add up to 1. So the sum of two resized tables of lines,
timm's factorized embedding, is their sum ``Y[:, None] + X``, resized. From here on there is one kind
of table. For tokens of half precision the sum is rounded once, where timm rounds each line and then
their sum: the error (RMS) is 0.68 of timm's (30 cases, bfloat16 and float16).

Tests: tests/contract/test_backends.py.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from . import kept
from .matrices import grid_taps, interpolate
from .spec import ResizeSpec, Size

Embeddings = Iterable[tuple[Size, Tensor]]
"""The size (h, w) of each grid with its embeddings (h*w, C), in any order."""

PositionTable = tuple[Tensor, ...]
"""A learned table ([1,] H0, W0, C); or two, ([1,] H0, C) and ([1,] W0, C), whose lines are added."""


def size_of(table: PositionTable) -> Size:
    """H0 and W0."""
    y_axis = -3 if len(table) == 1 else -2
    return table[0].shape[y_axis], table[-1].shape[-2]


def whole(table: PositionTable) -> Tensor:
    """One table (H0, W0, C): the learned one, or the sums of lines, in float32 at least."""
    if len(table) == 1:
        return table[0].flatten(0, -3)
    rows, columns = (lines.reshape(lines.shape[-2:]) for lines in table)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    return rows.to(dtype)[:, None] + columns.to(dtype)


def interpolated(
    table: PositionTable, sizes: Iterable[Size], spec: ResizeSpec, dtype: torch.dtype
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


def definition(table: Tensor, sizes: Iterable[Size], spec: ResizeSpec) -> Embeddings:
    """The embeddings of each size from a float64 table (H0, W0, C), by dense float64 matrices.

    All else in this package computes this formula faster. It runs where PyTorch has to derive it
    (second derivatives, ``is_grads_batched``). Neither autocast nor TF32 touches float64.
    """
    import einx  # here, because it takes seconds

    h0, w0, _ = table.shape
    table_size = h0, w0
    for size in sizes:
        with kept.unseen():
            rows, columns = (
                taps.dense().to(table.device, non_blocking=True)
                for taps in grid_taps(size, table_size, spec, torch.float32)
            )  # (h, H0), (w, W0)
        yield size, einx.dot("h h0, h0 w0 c, w w0 -> (h w) c", rows, table, columns)
