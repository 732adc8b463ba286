"""The tokens of a batch: add embeddings to them, sum gradients over them, and tell autograd.

Tests: tests/contract/test_backends.py.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..resampling.block_sum import BlockSum
from ..resampling.spec import Size
from .plan import Run


def add_to_tokens(x: Tensor, runs: Iterable[Run], embeddings: Tensor) -> None:
    """Add a grid's embeddings (h*w, C) to the tokens of its runs, ``x`` (B, N, C), in place."""
    embeddings = embeddings.to(x.dtype)
    cells: int | Tensor | None = None
    for run in runs:
        if run.cells is not cells:  # runs may share them
            cells = run.cells
            if isinstance(cells, Tensor):
                rows = embeddings.index_select(0, cells)
            elif cells < len(embeddings):
                rows = embeddings[:cells]
            else:
                rows = embeddings
        # A view of x, so this writes into x itself.
        x[run.samples, run.tokens].add_(rows)


def sum_over_tokens(g: Tensor, runs: Sequence[Run], size: Size, dtype: torch.dtype) -> Tensor:
    """The transpose of ``add_to_tokens``: the sum (h*w, C) over a grid's runs, in ``dtype``.

    ``g`` (B, N, C): the gradient of the tokens. The sum may be a view of it.
    """
    h, w = size
    total = BlockSum(h * w, dtype)
    for run in runs:
        # One slice after the other. Where two slices in one index take everything, PyTorch calls
        # ``alias``, which refuses batches of gradients.
        part = g[run.samples].transpose(0, 1)[run.tokens]  # (tokens, samples, C)
        part = part[:, 0] if part.shape[1] == 1 else part.sum(1, dtype=dtype)  # (tokens, C)
        if isinstance(run.cells, Tensor):
            total.add(part, run.cells)
            continue
        if run.cells < len(part):  # all take the first cell
            part = part.sum(0, keepdim=True, dtype=dtype)
        if run.cells == h * w and len(runs) == 1:
            return part.to(dtype).contiguous()
        total.add(part)
    return total.total()


def check_no_shared_elements(x: Tensor) -> None:
    """Raise RuntimeError, as PyTorch's own ``add_`` does, if elements of ``x`` share memory.

    Our sums write into views, where PyTorch cannot see it.
    """
    if torch._debug_has_internal_overlap(x) == 1:
        raise RuntimeError(
            "x cannot be added to in place: several of its elements are one and the same memory "
            "location (as after expand()); clone() it before"
        )


class AddedInPlace(torch.autograd.Function):
    """Tells autograd that something linear in a table is added into ``x``, in place.

    ``forward`` only marks ``x`` as changed: who calls it writes into ``x`` after that. The gradient
    of ``x`` passes through untouched.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: Callable[[Tensor], Tensor], table: Tensor) -> Tensor:
        """``gradient(g)`` gives the gradient of ``table`` in any dtype; autograd casts it."""
        ctx.gradient = gradient
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradient of ``x``, and that of the table."""
        (g,) = grads
        of_table = None
        if ctx.needs_input_grad[2]:
            of_table = ctx.gradient(g)
        return g, None, of_table
