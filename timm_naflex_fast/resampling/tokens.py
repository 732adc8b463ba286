"""Views on the tokens of a batch: add cells to them, sum gradients over them, and hand both to autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .grids import Group


class Tokens(NamedTuple):
    """The tokens of each sample, as views.

    Args:
        in_grid: for each sample, its tokens that lie in the grid, (tokens, C).
        rest: for each sample, the tokens behind them, (rest, C).
    """

    in_grid: Sequence[Tensor]
    rest: Sequence[Tensor]

    @classmethod
    def of(cls, x: Tensor, counts: list[tuple[int, int]]) -> Tokens:
        """Views on ``x``, (B, N, C) or packed (T, C). ``counts``: of each sample, its tokens in the grid and behind."""
        if x.ndim == 3 and not x.is_contiguous():
            return cls([s[:n] for s, (n, _) in zip(x, counts)], [s[n:] for s, (n, _) in zip(x, counts)])
        # One split. To slice sample by sample costs as much as the embeddings (64 samples of a 16 x 16 table).
        parts = x.view(-1, x.shape[-1]).split_with_sizes([n for pair in counts for n in pair])
        return cls(parts[::2], parts[1::2])

    def add(self, group: Group, cells: Tensor) -> None:
        """Add a group's cells (h*w, C) to the tokens of its samples, in place."""
        if group.pads:
            for sample in group.samples:
                self.rest[sample].add_(cells[:1])
        cells = cells[: group.tokens] if group.cells is None else cells[group.cells]
        for sample in group.samples:
            self.in_grid[sample].add_(cells)

    def sum(self, group: Group, dtype: torch.dtype) -> Tensor:
        """The adjoint of ``add``: the sum (h*w, C) over the samples of a group, in ``dtype``."""
        first, *others = (self.in_grid[sample] for sample in group.samples)
        total = torch.add(first.to(dtype), others[0]) if others else first.to(dtype)
        for other in others[1:]:
            total += other
        cells = total.contiguous()
        if group.cells is not None or group.tokens < group.h * group.w:
            cells = total.new_zeros(group.h * group.w, total.shape[-1])
            if group.cells is None:
                cells[: group.tokens] = total
            else:
                cells.index_add_(0, group.cells, total)
        if group.pads:
            if cells.data_ptr() == first.data_ptr():  # one sample in ``dtype``: its own memory
                cells = cells.clone()
            for sample in group.samples:
                cells[0] += self.rest[sample].sum(0, dtype=dtype)
        return cells


class AddedInPlace(torch.autograd.Function):
    """Tells autograd that something linear in the tables has been added into ``x``, in place.

    The gradient of ``x`` passes through untouched.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradients: Callable[[Tensor], Iterable[Tensor]] | None, *tables: Tensor) -> Tensor:
        """``gradients(g)`` gives the gradients of ``tables``, in any dtype; None where there are no tables."""
        ctx.gradients, ctx.tables = gradients, [(table.shape, table.dtype) for table in tables]
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """The gradient of ``x`` itself, and those of the tables in the tables' shapes and dtypes."""
        (g,) = grads
        found = ctx.gradients(g) if any(ctx.needs_input_grad[2:]) else [None] * len(ctx.tables)
        return g, None, *(grad if grad is None else grad.reshape(s).to(d) for grad, (s, d) in zip(found, ctx.tables))


def unusual(*tensors: Tensor) -> str | None:
    """Why our in-place sums cannot take these tensors, in words; None if they can.

    Where they cannot, PyTorch's own operations have to run: a library's own code, or plain products.
    """
    if torch.compiler.is_compiling():  # whose own classes of tensors stand for plain ones
        return "a tensor of the class DTensor" if any(is_dtensor(tensor) for tensor in tensors) else None
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"a tensor of the class {type(tensor).__name__}"
        if tensor.device.type == "meta":
            return "a meta tensor"
        if torch._C._functorch.is_legacy_batchedtensor(tensor):
            return "a batch of gradients"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    return None


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is spread over the ranks of a device mesh. Told by what it has: to import the class takes long."""
    return hasattr(tensor, "device_mesh")


def check_writable(x: Tensor) -> None:
    """Raise RuntimeError, as PyTorch's own ``add_`` does, unless ``x`` may be changed in place.

    Asked before the first write: our sums write into views that autograd does not see, where PyTorch cannot ask.
    """
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape)):
        raise RuntimeError(
            "x cannot be added to in place: several of its elements are one and the same memory location "
            "(as after expand()); clone() it before"
        )
    base = x if x._base is None else x._base
    if torch.is_grad_enabled() and base.requires_grad and base.is_leaf:
        kind = "a leaf" if x._base is None else "a view of a leaf"
        raise RuntimeError(f"x cannot be added to in place: it is {kind} tensor that requires a gradient")
