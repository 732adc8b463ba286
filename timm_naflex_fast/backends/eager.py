"""The backend that reads the grids on the host: any strategy, any device.

It groups the samples by grid, lets the strategy resample the tables for each group, adds the embeddings to the tokens,
and tells autograd how to go back. ``AddedInPlace`` is one node for the whole batch: the gradient of the tokens passes
through untouched, and is read once for the tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from ..resampling import cache, dense_resize, grids
from ..resampling.checks import check_writable
from ..resampling.dense_resize import Embeddings
from ..resampling.grids import Batch, GridGroup
from ..resampling.matrices import ResizeSpec
from ..resampling.tokens import AddedInPlace, Tokens
from ..strategies import STRATEGIES, Strategy
from ..tracing import why_unsupported

Placement = Tensor | tuple[int, int]
"""Coordinates (B, N, 2) of a NaFlex batch, or the grid (h, w) of every sample of a batch of plain images."""
LARGEST_COMPARED = 2**13  # coordinates: a larger batch is grouped anew each time


def add(x: Tensor, tables: tuple[Tensor, ...], placement: Placement, spec: ResizeSpec, strategy: Strategy) -> None:
    """Add the tables, resampled to each sample's grid, into ``x`` (B, N, C) in place; see ``dispatch.add``."""
    add_batch(x, tables, batch_on_host(x, placement, spec, strategy.whole_square), strategy)


def add_batch(x: Tensor, tables: tuple[Tensor, ...], batch: Batch, strategy: Strategy) -> None:
    """Add the tables, resampled to each group's grid, into ``x``, a batch (B, N, C) or packed (T, C).

    All checks, autograd's too, come before the first write; the embeddings come later, one grid at a time.
    """
    check_writable(x)
    if not batch.groups or not x.shape[-1]:
        return
    _raise_malloc_thresholds()  # pragma: no mutate: it changes times alone
    sources, ndim, trains = tables, 3 if len(tables) == 1 else 2, False
    tables = ()
    for table in sources:
        tables += (table if table.ndim == ndim else table.squeeze(0),)
        trains |= table.requires_grad
    inputs: Sequence[Tensor] = ()
    if trains and torch.is_grad_enabled():
        cache.invalidate(*sources)
        inputs, embeddings = strategy.inputs(tables, strategy.resample(tables, batch))
    else:
        embeddings = _resample_frozen(sources, tables, batch, strategy)
    if torch.is_grad_enabled() and (inputs or x.requires_grad):
        gradients = partial(_gradients, [tensor.shape for tensor in inputs], batch, strategy)
        AddedInPlace.apply(x, gradients, *inputs)  # before we write: autograd may forbid it
    tokens = Tokens.split(x.detach(), batch.counts)
    with torch.no_grad():
        for group, embedding in embeddings:
            tokens.add(group, embedding.to(x.dtype))


def gradient(g: Tensor, table_shape: Sequence[int], patch_coord: Tensor, spec: ResizeSpec) -> Tensor:
    """The gradient (H0, W0, C) of a learned table from that of the tokens (B, N, C), in float32 at least."""
    batch = batch_on_host(g, patch_coord, spec)._replace(dtype=torch.promote_types(g.dtype, torch.float32))
    if not batch.groups:
        return g.new_zeros(table_shape, dtype=batch.dtype)
    (grad,) = _gradients([table_shape], batch, STRATEGIES["matmul"], g)
    return grad


def batch_on_host(x: Tensor, placement: Placement, spec: ResizeSpec, whole_square: bool = False) -> Batch:
    """The grids of the batch, read on the host; ``spec`` with the largest of them where that counts."""
    if not isinstance(placement, Tensor):
        return Batch(*grids.whole_batch(x, placement), spec, x.dtype)
    whole_square = whole_square and spec.ar_preserving
    group = partial(grids.group_grids, placement, x, embeds_padding=spec.embeds_padding, whole_square=whole_square)
    if placement.is_cpu and 0 < placement.numel() <= LARGEST_COMPARED:
        # A service often repeats its grids: the same bits, the same groups.
        groups, counts = cache.cached_by_bits("groups", placement, (spec.embeds_padding, whole_square), group)
    else:
        groups, counts = group()
    if spec.sampler == "affine_grid" and groups:
        h, w = max(group.h for group in groups), max(group.w for group in groups)
        spec = replace(spec, batch_max=spec.lengths(h, w))
    return Batch(groups, counts, spec, x.dtype)


def _resample_frozen(
    sources: tuple[Tensor, ...], tables: tuple[Tensor, ...], batch: Batch, strategy: Strategy
) -> Embeddings:
    """The embeddings of tables that need no gradient: cached from the second call on, if that costs less.

    A grid of a learned table's own size takes the table as it is: nothing is cached, nothing compared.
    """
    own_size = tables[0].shape[:2] if len(tables) == 1 and batch.spec.copies_own_size else None
    own, resized, sizes = [], [], []
    for group in batch.groups:
        size = (group.h, group.w)
        if size == own_size:
            own.append(group)
        else:
            resized.append(group)
            sizes.append(size)
    if not resized or not strategy.worth_keeping(tables, resized) or not cache.seen_before(sources):
        return strategy.resample(tables, batch)

    def build(copies: tuple[Tensor, ...], size: tuple[int, int]) -> Tensor:
        copies = tuple(copy.view(table.shape) for copy, table in zip(copies, tables))
        one = batch._replace(groups=[GridGroup(*size, [], 0)])
        ((_, embedding),) = strategy.resample(copies, one)
        return embedding.to(batch.token_dtype)

    made = zip(resized, cache.cached_resized(sources, sizes, (strategy, *batch[2:]), build))
    return [*made, *strategy.resample(tables, batch._replace(groups=own))] if own else made


def _gradients(shapes: Sequence[Sequence[int]], batch: Batch, strategy: Strategy, g: Tensor) -> Iterable[Tensor]:
    """The gradients of the strategy's inputs, which have these shapes, from that of the tokens ``g``."""
    if not batch.counts:  # it is empty
        return [g.new_zeros(shape) for shape in shapes]
    if why_unsupported(g) or (torch.is_grad_enabled() and g.requires_grad):
        make = partial(strategy.differentiable, batch=batch)
        return dense_resize.gradients_by_autograd(g, shapes, make, batch.counts)
    with torch.no_grad():
        return strategy.transpose(Tokens.split(g.detach(), batch.counts), shapes, batch)


@lru_cache(maxsize=1)
def _raise_malloc_thresholds() -> None:
    """Make glibc reuse temporaries of a few MB: to free one block of 31 MiB raises its thresholds to that size.

    By default glibc returns them to the kernel at once, and the next call faults them in again page by page, which took
    longer than the sums (27 ms instead of 11, 64 samples of a 32 x 32 table). No memory is touched here.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8, device="cpu")
