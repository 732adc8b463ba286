"""Float32 sums of many tensors that do not drift."""

import torch
from torch import Tensor

# At most this many tensors are added one after the other; longer sums are added up in pairs.
MAX_SEQUENTIAL = 16


class PairwiseSum:
    """The sum (rows, C) of tensors, as they come; few of them are alive at a time.

    Thousands of float32 numbers added one after the other would be wrong by 1e-5. So ``_sums``
    holds sums of 2^k parts each, k smaller and smaller: two of one size become one.
    """

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self.rows = rows
        self.dtype = dtype
        self._sums: list[Tensor] = []
        self._parts = 0
        self._accumulated = 0

    def add(self, part: Tensor) -> None:
        """Add one more (rows, C). It must own its memory, which is written to."""
        # Two sums of one size become one only now, since ``accumulate`` may have added to the
        # newest of them until here.
        parts = self._parts
        while parts and parts % 2 == 0:
            newest = self._sums.pop()
            self._sums[-1].add_(newest)
            parts //= 2
        self._sums.append(part)
        self._parts += 1

    def accumulate(self, part: Tensor, rows: Tensor | None = None) -> None:
        """Add one more of any dtype, which is not written to: ``MAX_SEQUENTIAL`` go to one sum.

        ``rows``: to which rows of the sum those of ``part`` are added, to some perhaps twice (on CUDA
        in no fixed order); None: to the first ones.
        """
        # Every sixteenth begins a new sum: a copy of itself if it is complete, else zeros.
        begins = self._accumulated % MAX_SEQUENTIAL == 0
        self._accumulated += 1
        if begins and rows is None and len(part) == self.rows:
            self.add(part.to(self.dtype, copy=True, memory_format=torch.contiguous_format))
            return
        if begins:
            self.add(part.new_zeros(self.rows, part.shape[1], dtype=self.dtype))

        newest = self._sums[-1]
        if rows is None:
            newest[: len(part)].add_(part)
        else:
            newest.index_add_(0, rows, part.to(self.dtype))

    def total(self) -> Tensor:
        """The sum of all that came, of one at least."""
        total = self._sums.pop()
        while self._sums:
            total = self._sums.pop().add_(total)
        return total
