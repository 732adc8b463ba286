"""The matmul strategy as ``torch.library`` operators, opaque to compiled graphs, each with its gradient's.

``add_learned`` holds the eager form, many times faster than the plain operations that a graph could look into. It reads
the grids on the host, so CUDA graphs must leave it out. ``add_learned_triton`` holds the Triton kernels and may stand
in CUDA graphs. ``torch.export`` gets the plain operations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..resampling import exact as matmul
from ..resampling.grids import check_coord, group_grids
from ..resampling.matrices import Resampling
from . import triton as matmul_triton


class Operators(NamedTuple):
    """``add(x, table, patch_coord, *how)`` returns the sum, ``grad(g, table, patch_coord, *how)`` that of the table."""

    add: Any
    grad: Any

    def add_learned(self, x: Tensor, table: Tensor, patch_coord: Tensor, how: Resampling) -> None:
        """Add the table ([1,] H0, W0, C), resampled to each sample's grid, into ``x`` (B, N, C) in place.

        In a graph the copy is none: what is written last simply takes the name ``x``.
        """
        settings = (how.mode, how.antialias, how.align_corners, how.ar_preserving)
        x.copy_(self.add(x, table.reshape(table.shape[-3:]), patch_coord, *settings))


def _operator(name: str, captures: bool) -> Any:
    """``torch.library.custom_op``; unless it ``captures``, kept out of CUDA graphs where PyTorch has a tag for that."""
    tagged = hasattr(torch.Tag, "cudagraph_unsafe") and "tags" in inspect.signature(torch.library.custom_op).parameters
    if tagged and not captures:
        return torch.library.custom_op(name, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
    return torch.library.custom_op(name, mutates_args=())


def _operators(
    add_name: str,
    grad_name: str,
    add: Callable[[Tensor, Tensor, Tensor, Resampling], None],
    grad: Callable[[Tensor, Tensor, Tensor, Resampling], Tensor],
    captures: bool,
) -> Operators:
    """Register a form's two operators, from ``add`` (in place) and ``grad`` (of the table)."""

    @_operator(f"timm_naflex_fast::{add_name}", captures)
    def add_operator(
        x: Tensor,
        table: Tensor,
        patch_coord: Tensor,
        mode: str,
        antialias: bool,
        align_corners: bool,
        ar_preserving: bool,
    ) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        add(out, table.detach(), patch_coord, Resampling(mode, antialias, align_corners, ar_preserving))
        return out

    @_operator(f"timm_naflex_fast::{grad_name}", captures)
    def grad_operator(
        g: Tensor,
        table: Tensor,
        patch_coord: Tensor,
        mode: str,
        antialias: bool,
        align_corners: bool,
        ar_preserving: bool,
    ) -> Tensor:
        return grad(g, table.detach(), patch_coord, Resampling(mode, antialias, align_corners, ar_preserving))

    @add_operator.register_fake
    def _(x: Tensor, table: Tensor, patch_coord: Tensor, *how: Any) -> Tensor:
        check_coord(patch_coord, x)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @grad_operator.register_fake
    def _(g: Tensor, table: Tensor, patch_coord: Tensor, *how: Any) -> Tensor:
        return torch.empty_like(table, memory_format=torch.contiguous_format)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, table, patch_coord, *ctx.how = inputs
        ctx.save_for_backward(table, patch_coord)

    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        table, patch_coord = ctx.saved_tensors
        grad_table = grad_operator(g, table, patch_coord, *ctx.how) if ctx.needs_input_grad[1] else None
        return g, grad_table, None, None, None, None, None

    add_operator.register_autograd(backward, setup_context=setup)
    return Operators(add_operator, grad_operator)


def _eager_add(x: Tensor, table: Tensor, patch_coord: Tensor, how: Resampling) -> None:
    matmul.add_learned(x, table, group_grids(patch_coord, x), how)


def _eager_grad(g: Tensor, table: Tensor, patch_coord: Tensor, how: Resampling) -> Tensor:
    """The table's values are not looked at."""
    leaf, out = table.requires_grad_(), torch.zeros_like(g)
    with torch.enable_grad():
        _eager_add(out, leaf, patch_coord, how)
        if not out.requires_grad:  # an empty batch
            return torch.zeros_like(table)
        return torch.autograd.grad(out, leaf, g)[0]


def _triton_grad(g: Tensor, table: Tensor, patch_coord: Tensor, how: Resampling) -> Tensor:
    if g.numel() == 0:
        return torch.zeros_like(table, memory_format=torch.contiguous_format)
    patch_coord = patch_coord.to(g.device)
    plan = matmul_triton.make_plan(patch_coord, table.shape, how, norms=True)
    return matmul_triton.table_grad(g, table.shape, patch_coord, plan, how).to(table.dtype)


eager = _operators("add_learned", "learned_grad", _eager_add, _eager_grad, captures=False)
triton = _operators("add_learned_triton", "learned_grad_triton", matmul_triton.add_learned, _triton_grad, captures=True)
