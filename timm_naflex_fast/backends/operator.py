"""The matmul strategy as two ``torch.library`` operators: one graph under ``torch.compile``.

A compiled graph cannot look at the values of coordinates, and ``traceable``, which needs none, is
many times slower. So the graph holds one operator, inside which ``eager`` runs. It reads the grids
on the host, so CUDA graphs leave it out. The backward pass of each operator calls the other, so
both can be differentiated any number of times.
"""

import inspect
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..batch.checks import InvalidCoordinateError
from ..resampling.matrices import ResizeSpec
from ..strategies import STRATEGIES
from . import eager, traceable

SPEC_FIELDS = (
    "str interpolation, bool antialias, bool align_corners, bool ar_preserving, str reference"
)
"""The fields of ``ResizeSpec`` as an operator's arguments, except ``batch_max``, which is read from
the batch."""

_options: dict[str, Any] = dict(mutates_args=())
if (
    hasattr(torch.Tag, "cudagraph_unsafe")
    and "tags" in inspect.signature(torch.library.custom_op).parameters
):
    _options["tags"] = (torch.Tag.cudagraph_unsafe,)


def add(x: Tensor, tables: tuple[Tensor, ...], patch_coord: Tensor, spec: ResizeSpec) -> None:
    """Add the table ([1,] H0, W0, C), resampled to each sample's grid, into ``x`` (B, N, C) in
    place."""
    (table,) = tables
    fields = (
        spec.interpolation,
        spec.antialias,
        spec.align_corners,
        spec.ar_preserving,
        spec.reference,
    )
    total, _ = add_learned(x, table.reshape(table.shape[-3:]), patch_coord, *fields)
    x.copy_(total)  # the compiler removes this copy


@torch.library.custom_op(
    "timm_naflex_fast::add_learned",
    schema=f"(Tensor x, Tensor table, Tensor coord, {SPEC_FIELDS}) -> (Tensor, Tensor)",
    **_options,
)
def add_learned(
    x: Tensor, table: Tensor, patch_coord: Tensor, *fields: Any
) -> tuple[Tensor, Tensor]:
    """``x`` plus the table, and a copy of the coordinates for the backward pass."""
    out, spec = x.clone(memory_format=torch.contiguous_format), ResizeSpec(*fields)
    batch = out, (table.detach(),), patch_coord, spec
    eager.add_batch(*batch, STRATEGIES["matmul"], on_invalid=partial(traceable.add, *batch))
    return out, patch_coord.clone()


@torch.library.custom_op(
    "timm_naflex_fast::learned_grad",
    schema=f"(Tensor g, Tensor coord, SymInt rows, SymInt cols, {SPEC_FIELDS}) -> Tensor",
    **_options,
)
def learned_grad(g: Tensor, patch_coord: Tensor, rows: int, cols: int, *fields: Any) -> Tensor:
    """The table's gradient (rows, cols, C), float32 at least."""
    shape, spec = (rows, cols, g.shape[-1]), ResizeSpec(*fields)
    try:
        return eager.gradient(g, shape, patch_coord, spec)
    except InvalidCoordinateError:
        return traceable.gradient(
            g, shape, patch_coord, spec
        )  # written out: autograd is off inside an operator


@add_learned.register_fake
def _fake_add(x: Tensor, table: Tensor, patch_coord: Tensor, *fields: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(patch_coord)


@learned_grad.register_fake
def _fake_grad(g: Tensor, patch_coord: Tensor, rows: int, cols: int, *fields: Any) -> Tensor:
    return g.new_empty(rows, cols, g.shape[-1], dtype=torch.promote_types(g.dtype, torch.float32))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, table, _, *ctx.fields = inputs
    ctx.rows, ctx.cols, ctx.dtype = table.shape[0], table.shape[1], table.dtype
    ctx.save_for_backward(
        output[1]
    )  # the caller may fill the coordinates themselves with those of the next batch


def _backward(ctx: Any, g: Tensor, _: Any) -> tuple[Any, ...]:
    grad_table = None
    if ctx.needs_input_grad[1]:
        grad_table = learned_grad(g, ctx.saved_tensors[0], ctx.rows, ctx.cols, *ctx.fields).to(
            ctx.dtype
        )
    return g, grad_table, *[None] * (1 + len(ctx.fields))


def _setup_grad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    g, patch_coord, _, _, *ctx.fields = inputs
    ctx.shape = g.shape
    ctx.save_for_backward(patch_coord)


def _backward_of_grad(ctx: Any, grad_table: Tensor) -> tuple[Any, ...]:
    total, _ = add_learned(
        grad_table.new_zeros(ctx.shape), grad_table, ctx.saved_tensors[0], *ctx.fields
    )
    return total, *[None] * (3 + len(ctx.fields))  # autograd casts


add_learned.register_autograd(_backward, setup_context=_setup)
learned_grad.register_autograd(_backward_of_grad, setup_context=_setup_grad)
