"""The matmul strategy as ``torch.library`` operators: one graph under ``torch.compile``, and the gradient's operator.

A graph cannot look into the coordinates, and the form that it could look into is many times slower. So the graph holds
an operator, inside which the eager form runs. There are two pairs of operators:

- ``add_learned`` reads the grids on the host, so CUDA graphs must leave it out;
- ``add_learned_triton`` launches Triton's kernels and may be part of CUDA graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..resampling.matrices import ResizeSpec
from . import dispatch, triton

SETTINGS = "str mode, bool antialias, bool align_corners, bool ar_preserving, str sampler"
"""The fields of ``ResizeSpec`` as an operator's arguments, but ``within``, which is read from the batch."""


class Operators(NamedTuple):
    """``add(x, table, patch_coord, *settings)`` returns the sum, ``grad(g, ...)`` the table's gradient."""

    add: Any
    grad: Any


def add_learned(x: Tensor, table: Tensor, patch_coord: Tensor, how: ResizeSpec) -> None:
    """Add the table ([1,] H0, W0, C), resampled to each sample's grid, into ``x`` (B, N, C) in place."""
    add = (on_triton if triton.serves(x, table, how) else eager).add
    settings = (how.mode, how.antialias, how.align_corners, how.ar_preserving, how.sampler)
    x.copy_(add(x, table.reshape(table.shape[-3:]), patch_coord, *settings))  # the compiler removes this copy


def _register(
    suffix: str,
    add: Callable[[Tensor, Tensor, Tensor, ResizeSpec], Tensor],
    grad: Callable[[Tensor, Tensor, Tensor, ResizeSpec], Tensor],
    in_cuda_graphs: bool,
) -> Operators:
    """Register two operators, from ``add``, which returns a new tensor, and ``grad`` of the table."""
    options: dict[str, Any] = dict(
        mutates_args=(), schema=f"(Tensor x, Tensor table, Tensor coord, {SETTINGS}) -> Tensor"
    )
    has_tag = hasattr(torch.Tag, "cudagraph_unsafe") and "tags" in inspect.signature(torch.library.custom_op).parameters
    if has_tag and not in_cuda_graphs:
        options["tags"] = (torch.Tag.cudagraph_unsafe,)

    @torch.library.custom_op(f"timm_naflex_fast::add_learned{suffix}", **options)
    def add_operator(x: Tensor, table: Tensor, patch_coord: Tensor, *settings: Any) -> Tensor:
        return add(x, table.detach(), patch_coord, ResizeSpec(*settings))

    @torch.library.custom_op(f"timm_naflex_fast::learned_grad{suffix}", **options)
    def grad_operator(g: Tensor, table: Tensor, patch_coord: Tensor, *settings: Any) -> Tensor:
        return grad(g, table.detach(), patch_coord, ResizeSpec(*settings))

    @add_operator.register_fake
    def _(x: Tensor, table: Tensor, patch_coord: Tensor, *settings: Any) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @grad_operator.register_fake
    def _(g: Tensor, table: Tensor, patch_coord: Tensor, *settings: Any) -> Tensor:
        return torch.empty_like(table, memory_format=torch.contiguous_format)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, table, patch_coord, *ctx.settings = inputs
        ctx.save_for_backward(table, patch_coord)

    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        table, patch_coord = ctx.saved_tensors
        grad_table = grad_operator(g, table, patch_coord, *ctx.settings) if ctx.needs_input_grad[1] else None
        return g, grad_table, *[None] * 6

    add_operator.register_autograd(backward, setup_context=setup)
    return Operators(add_operator, grad_operator)


def _eager_add(x: Tensor, table: Tensor, patch_coord: Tensor, how: ResizeSpec) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dispatch.add(out, (table,), patch_coord, how)
    return out


def _eager_grad(g: Tensor, table: Tensor, patch_coord: Tensor, how: ResizeSpec) -> Tensor:
    return dispatch.gradient_eagerly(g, table.shape, patch_coord, how).to(table.dtype)


eager = _register("", _eager_add, _eager_grad, in_cuda_graphs=False)
on_triton = _register("_triton", triton.operator_sum, triton.operator_gradient, in_cuda_graphs=True)
