"""The backend that reads the grids on the host: any strategy, any device.

For each group of the plan it lets the strategy resample the tables, adds the embeddings to the
tokens, and tells autograd how to go back. ``AddedInPlace`` is one node for the whole batch: the
gradient of the tokens passes through untouched, and is read once for the tables.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..batch import grids
from ..batch.checks import InvalidCoordinateError
from ..batch.grids import GridGroup, ResamplePlan
from ..batch.layout import OnInvalid, Sizes, TokenLayout
from ..batch.tokens import AddedInPlace, Tokens, assemble
from ..resampling import dense, kept, sparse
from ..resampling.dense import GroupEmbeddings
from ..resampling.matrices import ResizeSpec
from ..strategies.base import Strategy, Tables
from ..tracing import refuse_in_cuda_graph, why_unsupported

NEEDS_HOST = "here grids are read on the host, which no CUDA graph can record; it can record matmul by coordinates"


def resample(table: Tensor, sizes: Sizes, spec: ResizeSpec, strategy: Strategy) -> Tensor:
    """The table ([1,] H0, W0, C) resampled to ``sizes``, packed or padded; see
    ``dispatch.resample``."""
    refuse_in_cuda_graph(table.device, NEEDS_HOST)
    plan = sizes.plan(table, spec)._replace(dtype=torch.promote_types(table.dtype, torch.float32))
    out = torch.zeros(
        sum(map(sum, plan.counts)), table.shape[-1], dtype=table.dtype, device=table.device
    )
    add_plan(out, (table,), plan, strategy)
    return (
        out if sizes.length is None else out.view(len(sizes.values), sizes.length, table.shape[-1])
    )


def add_batch(
    x: Tensor,
    tables: Tables,
    layout: TokenLayout,
    spec: ResizeSpec,
    strategy: Strategy,
    on_invalid: OnInvalid = None,
) -> None:
    """Add the tables, resampled to each sample's grid, into ``x`` (B, N, C) in place; see
    ``dispatch.add``."""
    try:
        square = strategy.resizes_square
        plan = (
            grids.plan_batch(x, layout, spec, square)
            if isinstance(layout, Tensor)
            else layout.plan(x, spec)
        )
    except InvalidCoordinateError:
        if on_invalid is None:
            raise
        return on_invalid()
    add_plan(x, tables, plan, strategy)


def add_plan(x: Tensor, tables: Tables, plan: ResamplePlan, strategy: Strategy) -> None:
    """Add the tables, resampled to each group's grid, into ``x``, a batch (B, N, C) or packed (T,
    C).

    Autograd checks before the first write; the embeddings come later, one grid at a time.
    """
    if not plan.groups or not x.shape[-1]:
        return
    if watched := kept.watched():
        # ``allow_mutation_on_saved_tensors`` copies x at the first in-place operator on it. It
        # looks x up as it was saved, so this has to come before ``mark_dirty``; our writes below go
        # to views, which it does not see.
        with torch.no_grad():
            x[:1, :1].add_(-0.0)
    inputs: Tables = ()
    if torch.is_grad_enabled() and any(table.requires_grad for table in tables):
        inputs = tables
        kept.invalidate(*tables)
    if torch.is_grad_enabled() and (inputs or x.requires_grad):
        ndim = 3 if len(tables) == 1 else 2
        backward = partial(_gradients, [table.shape[-ndim:] for table in inputs], plan)
        AddedInPlace.apply(x, backward, *inputs)  # before we write: autograd may forbid it
    with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
        # On an accelerator nothing is kept: the host would wait for the comparison, and the sums
        # cost no more.
        uncached = inputs or watched or not tables[0].is_cpu
        embeddings = (
            strategy.resample(tables, plan)
            if uncached
            else _cached_embeddings(tables, plan, strategy)
        )
        if (
            watched
        ):  # one write to x itself: a selective checkpoint may hand back views of an earlier x
            cast = ((group, embedding.to(x.dtype)) for group, embedding in embeddings)
            x.add_(assemble(cast, plan.counts).view(x.shape))
            return
        tokens = Tokens(x, plan.counts)
        for group, embedding in embeddings:
            same = embedding.dtype is tokens.dtype
            tokens.add(group, embedding if same else embedding.to(tokens.dtype))


def gradient(
    g: Tensor, table_shape: Sequence[int], patch_coord: Tensor, spec: ResizeSpec
) -> Tensor:
    """The gradient (H0, W0, C) of a learned table from that of the tokens (B, N, C), in float32 at
    least."""
    dtype = torch.promote_types(g.dtype, torch.float32)
    plan = grids.plan_batch(g, patch_coord, spec)._replace(dtype=dtype)
    return (
        _gradients([table_shape], plan, g)[0]
        if plan.groups
        else g.new_zeros(table_shape, dtype=dtype)
    )


def _cached_embeddings(tables: Tables, plan: ResamplePlan, strategy: Strategy) -> GroupEmbeddings:
    """The embeddings of tables that need no gradient: those of a grid that comes again are cached,
    if that costs less.

    To compare costs two reads of each cell of a table; to sum, about eight reads of each cell of a
    grid. A grid of a learned table's own size takes the table as it is: nothing is cached, nothing
    compared.
    """
    made = kept.resized_by_key(tables)
    own_size = (
        tables[0].shape[-3:-1] if len(tables) == 1 and not plan.spec.use_grid_sample else None
    )
    again, others, cells = {}, [], 0
    for group in plan.groups:
        key = (group.h, group.w, strategy, plan.spec, plan.token_dtype, plan.dtype)
        if key in made and key[:2] != own_size:
            again[key] = group
            cells += 4 * group.h * group.w
        else:
            others.append(group)
            made.setdefault(key)  # seen once, at least
    if not again or (len(tables) == 1 and tables[0].numel() > cells * tables[0].shape[-1]):
        return strategy.resample(tables, plan)

    def build(copies: Tables, key: tuple[Any, ...]) -> Tensor:
        h, w, *_ = key
        ((_, embedding),) = strategy.resample(copies, plan._replace(groups=[GridGroup(h, w, [])]))
        return embedding.to(plan.token_dtype)

    repeated = zip(again.values(), kept.cached_resized(tables, list(again), build))
    return (
        [*repeated, *strategy.resample(tables, plan._replace(groups=others))]
        if others
        else repeated
    )


def _gradients(shapes: Sequence[Sequence[int]], plan: ResamplePlan, g: Tensor) -> Sequence[Tensor]:
    """The gradients of tables of these shapes from that of the tokens ``g``."""
    refuse_in_cuda_graph(g.device, NEEDS_HOST)
    if not plan.counts:  # it is empty
        return [g.new_zeros(shape) for shape in shapes]
    if why_unsupported(g) or (torch.is_grad_enabled() and g.requires_grad):
        return dense.gradients_by_autograd(g, shapes, plan)
    with torch.no_grad():
        return sparse.gradients(Tokens(g.detach(), plan.counts), shapes, plan)
