"""Float32 sums of many tensors that do not drift.

Tests: tests/contract/test_unusual_tensors.py.
"""

import torch
from torch import Tensor

# So many tensors are added one after the other: thousands would be wrong by 1e-5.
MAX_SEQUENTIAL = 16


class BlockSum:
    """The sum (rows, C) of tensors, as they come: sixteen go to one sum, and PyTorch adds up the
    sums in pairs."""

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self.rows = rows
        self.dtype = dtype
        self._sums: list[Tensor] = []
        self._parts = 0

    def add(self, part: Tensor, rows: Tensor | None = None, *, is_free: bool = False) -> None:
        """Add one more of any dtype, which is not written to.

        ``rows``: to which rows of the sum those of ``part`` are added, to some perhaps twice (on CUDA
        in no fixed order); None: to the first ones. ``is_free``: nobody else has ``part``, of the
        sum's dtype, so it may become the sum.
        """
        begins = self._parts % MAX_SEQUENTIAL == 0
        self._parts += 1
        if begins and rows is None and len(part) == self.rows:
            # To copy a table's gradient would take a tenth of a training call (measured: one
            # image of 240 tokens, C=768, 2 CPU cores).
            if not is_free:
                part = part.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
            self._sums.append(part)
            return
        if begins:
            self._sums.append(part.new_zeros(self.rows, part.shape[1], dtype=self.dtype))
        newest = self._sums[-1]
        if rows is None:
            newest[: len(part)].add_(part)
        else:
            newest.index_add_(0, rows, part.to(self.dtype))

    def total(self) -> Tensor:
        """The sum of all that came, of one at least."""
        if len(self._sums) == 1:
            return self._sums[0]
        return torch.stack(self._sums).sum(0)
