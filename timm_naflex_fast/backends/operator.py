"""The matmul strategy as ``torch.library`` operators: one graph under ``torch.compile``, and the gradient's operator.

A compiled graph cannot look at the values of coordinates, and ``portable``, which needs none, is many times slower. So
the graph holds one operator, and inside it ``eager`` or ``triton`` runs. There are two pairs of operators:

- ``add_learned`` reads the grids on the host, so CUDA graphs must leave it out;
- ``add_learned_triton`` launches Triton's kernels and may be part of CUDA graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..resampling.matrices import ResizeSpec
from . import eager, triton

SETTINGS = "str interpolation, bool antialias, bool align_corners, bool ar_preserving, str sampler"
"""The fields of ``ResizeSpec`` as an operator's arguments, except ``batch_max``, which is read from the batch."""


class Operators(NamedTuple):
    """``add(x, table, patch_coord, *settings)`` returns the sum and a copy of the coordinates, for the backward pass.

    ``grad(g, patch_coord, table_size, *settings)`` returns the table's gradient. The backward pass
    of each calls the other, so both can be differentiated any number of times.
    """

    add: Any
    grad: Any


def add(x: Tensor, tables: tuple[Tensor, ...], patch_coord: Tensor, spec: ResizeSpec) -> None:
    """Add the table ([1,] H0, W0, C), resampled to each sample's grid, into ``x`` (B, N, C) in place."""
    (table,) = tables
    operators = on_triton if triton.serves(x, table, spec) else on_host
    settings = (spec.interpolation, spec.antialias, spec.align_corners, spec.ar_preserving, spec.sampler)
    total, _ = operators.add(x, table.reshape(table.shape[-3:]), patch_coord, *settings)
    x.copy_(total)  # the compiler removes this copy


def _register(
    suffix: str,
    add: Callable[[Tensor, Tensor, Tensor, ResizeSpec], Tensor],
    grad: Callable[[Tensor, Sequence[int], Tensor, ResizeSpec], Tensor],
    in_cuda_graphs: bool,
) -> Operators:
    """Register two operators, from ``add``, which returns a new tensor, and ``grad`` of the table."""
    options: dict[str, Any] = dict(mutates_args=())
    has_tag = hasattr(torch.Tag, "cudagraph_unsafe") and "tags" in inspect.signature(torch.library.custom_op).parameters
    if has_tag and not in_cuda_graphs:
        options["tags"] = (torch.Tag.cudagraph_unsafe,)
    add_schema = f"(Tensor x, Tensor table, Tensor coord, {SETTINGS}) -> (Tensor, Tensor)"
    grad_schema = f"(Tensor g, Tensor coord, SymInt rows, SymInt cols, {SETTINGS}) -> Tensor"

    @torch.library.custom_op(f"timm_naflex_fast::add_learned{suffix}", schema=add_schema, **options)
    def add_operator(x: Tensor, table: Tensor, patch_coord: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        return add(x, table.detach(), patch_coord, ResizeSpec(*settings)), patch_coord.clone()

    @torch.library.custom_op(f"timm_naflex_fast::learned_grad{suffix}", schema=grad_schema, **options)
    def grad_operator(g: Tensor, patch_coord: Tensor, rows: int, cols: int, *settings: Any) -> Tensor:
        return grad(g, (rows, cols, g.shape[-1]), patch_coord, ResizeSpec(*settings))

    @add_operator.register_fake
    def _(x: Tensor, table: Tensor, patch_coord: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(patch_coord)

    @grad_operator.register_fake
    def _(g: Tensor, patch_coord: Tensor, rows: int, cols: int, *settings: Any) -> Tensor:
        return g.new_empty(rows, cols, g.shape[-1], dtype=torch.promote_types(g.dtype, torch.float32))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, table, _, *ctx.settings = inputs
        ctx.rows, ctx.cols, ctx.dtype = table.shape[0], table.shape[1], table.dtype
        ctx.save_for_backward(output[1])  # the caller may fill the coordinates themselves with those of the next batch

    def backward(ctx: Any, g: Tensor, _: Any) -> tuple[Any, ...]:
        grad_table = None
        if ctx.needs_input_grad[1]:
            grad_table = grad_operator(g, ctx.saved_tensors[0], ctx.rows, ctx.cols, *ctx.settings).to(ctx.dtype)
        return g, grad_table, *[None] * 6

    def setup_grad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, patch_coord, _, _, *ctx.settings = inputs
        ctx.shape, ctx.dtype = g.shape, g.dtype
        ctx.save_for_backward(patch_coord)

    def backward_of_grad(ctx: Any, grad_table: Tensor) -> tuple[Any, ...]:
        zeros = grad_table.new_zeros(ctx.shape)
        total, _ = add_operator(zeros, grad_table, ctx.saved_tensors[0], *ctx.settings)
        return total.to(ctx.dtype), *[None] * 8

    add_operator.register_autograd(backward, setup_context=setup)
    grad_operator.register_autograd(backward_of_grad, setup_context=setup_grad)
    return Operators(add_operator, grad_operator)


on_host = _register("", eager.operator_sum, eager.gradient, in_cuda_graphs=False)
on_triton = _register("_triton", triton.operator_sum, triton.operator_gradient, in_cuda_graphs=True)
