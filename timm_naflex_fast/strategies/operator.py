"""The matmul strategy's eager form as a ``torch.library`` operator, opaque to compiled graphs.

The eager form, many times faster than the plain operations that a graph could look into, serves ``torch.compile``
too. It reads the grids on the host, so CUDA graphs must leave it out. ``torch.export`` gets the plain operations.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..grids import check_coord, group_grids
from ..resize import Resampling
from . import matmul


def _operator(name: str) -> Any:
    """``torch.library.custom_op``, kept out of CUDA graphs where PyTorch knows of such a tag."""
    if hasattr(torch.Tag, "cudagraph_unsafe") and "tags" in inspect.signature(torch.library.custom_op).parameters:
        return torch.library.custom_op(name, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
    return torch.library.custom_op(name, mutates_args=())


@_operator("timm_naflex_fast::add_learned")
def add_learned_operator(
    x: Tensor,
    table: Tensor,
    patch_coord: Tensor,
    mode: str,
    antialias: bool,
    align_corners: bool,
    ar_preserving: bool,
) -> Tensor:
    """``x`` (B, N, C) plus the table (H0, W0, C), resampled to each sample's grid; a new tensor."""
    out = x.clone(memory_format=torch.contiguous_format)
    how = Resampling(mode, antialias, align_corners, ar_preserving)
    matmul.add_learned(out, table.detach(), group_grids(patch_coord, out), how)
    return out


@_operator("timm_naflex_fast::learned_grad")
def learned_grad_operator(
    grad: Tensor,
    table: Tensor,
    patch_coord: Tensor,
    mode: str,
    antialias: bool,
    align_corners: bool,
    ar_preserving: bool,
) -> Tensor:
    """The gradient (H0, W0, C) of the table, from that of the tokens; the table's values are not looked at."""
    how = Resampling(mode, antialias, align_corners, ar_preserving)
    leaf, out = table.detach().requires_grad_(), torch.zeros_like(grad)
    with torch.enable_grad():
        matmul.add_learned(out, leaf, group_grids(patch_coord, out), how)
        if not out.requires_grad:  # an empty batch
            return torch.zeros_like(table)
        return torch.autograd.grad(out, leaf, grad)[0]


@add_learned_operator.register_fake
def _(x: Tensor, table: Tensor, patch_coord: Tensor, *how: Any) -> Tensor:
    check_coord(patch_coord, x)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@learned_grad_operator.register_fake
def _(grad: Tensor, table: Tensor, patch_coord: Tensor, *how: Any) -> Tensor:
    return torch.empty_like(table, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, table, patch_coord, *ctx.how = inputs
    ctx.save_for_backward(table, patch_coord)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    table, patch_coord = ctx.saved_tensors
    grad_table = learned_grad_operator(grad, table, patch_coord, *ctx.how) if ctx.needs_input_grad[1] else None
    return grad, grad_table, None, None, None, None, None


add_learned_operator.register_autograd(_backward, setup_context=_setup)


def add_learned(x: Tensor, table: Tensor, patch_coord: Tensor, how: Resampling) -> None:
    """Add the table ([1,] H0, W0, C), resampled to each sample's grid, into ``x`` (B, N, C) in place, as one operator.

    In a graph the copy is none: what is written last simply takes the name ``x``.
    """
    settings = (how.mode, how.antialias, how.align_corners, how.ar_preserving)
    x.copy_(add_learned_operator(x, table.reshape(table.shape[-3:]), patch_coord, *settings))
